package stats

import (
	"math"
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/spec"
)

// Price is the price of a variant, and what the variant achieves for it.
type Price struct {
	Variant string `json:"variant"` // name of the variant
	// Price of all its nodes per hour.
	Price    float64 `json:"price"`
	Currency string  `json:"currency"` // ISO 4217 code
	// Values are the leading metrics of the workloads per price.
	Values []PerPrice `json:"values"`
	// DominatedBy are variants that cost no more, and compared with which this one is proven better in
	// no metric (by more than the margin).
	DominatedBy []string `json:"dominated_by,omitempty"`
	MaybeBy     []string `json:"maybe_dominated_by,omitempty"` // variants that seem to dominate this one, which more blocks might prove
}

// PerPrice is a metric per price: divided by the price, or, if lower is better,
// multiplied by it. Half the latency for twice the price is then equally good.
type PerPrice struct {
	Workload string     `json:"workload"` // name of the workload
	Pairs    int        `json:"pairs"`    // number of pairs
	Metric   string     `json:"metric"`   // name of the metric
	Unit     string     `json:"unit"`     // its unit
	Value    float64    `json:"value"`    // the metric per price
	CI95     [2]float64 `json:"ci95"`     // 95% interval of the value
}

// prices returns the prices of the variants that have one, in the experiment's order.
func (t *table) prices(rows []Row) []Price {
	var all []Price
	for _, v := range t.exp.Spec.Variants {
		amount, currency := t.exp.PriceOf(v)
		if amount == 0 {
			continue
		}
		p := Price{Variant: v.Name, Price: amount, Currency: currency, Values: []PerPrice{}}
		for _, r := range rows {
			c := t.byKey[key{r.Variant, r.Workload, r.Pairs}]
			if r.Variant == v.Name && r.N > 0 && slices.Contains(Judged(t.exp, c.workload), r.Metric) {
				p.Values = append(p.Values, perPrice(r, amount, currency))
			}
		}
		for _, other := range t.exp.Spec.Variants {
			price, _ := t.exp.PriceOf(other)
			if price == 0 || price > amount || other.Name == v.Name {
				continue
			}
			switch t.dominates(other, v, price < amount) {
			case isDominated:
				p.DominatedBy = append(p.DominatedBy, other.Name)
			case seemsDominated:
				p.MaybeBy = append(p.MaybeBy, other.Name)
			}
		}
		all = append(all, p)
	}
	return all
}

func perPrice(r Row, price float64, currency string) PerPrice {
	p := PerPrice{Workload: r.Workload, Pairs: r.Pairs, Metric: r.Metric, Unit: r.Unit + " × " + currency + "/h"}
	factor := price
	if metrics.Get(r.Metric).HigherIsBetter() {
		factor, p.Unit = 1/price, r.Unit+" per "+currency+"/h"
	}
	p.Value, p.CI95 = r.Mean*factor, [2]float64{r.CI95[0] * factor, r.CI95[1] * factor}
	return p
}

type dominance int

const (
	notDominated dominance = iota
	seemsDominated
	isDominated
)

// dominates reports whether other dominates v: v is not better than other by more than the margin in any
// metric, and other is cheaper, or v is worse in some metric. The caller makes sure that v does not cost
// less. This is an intersection-union test: all claims must hold, each by its own interval, so none needs an
// adjustment for their number (Berger, "Multiparameter hypothesis testing and acceptance sampling",
// Technometrics 24, 1982).
func (t *table) dominates(other, v spec.Variant, cheaper bool) dominance {
	verdict, worse, compared := isDominated, cheaper, false
	margin := math.Log1p(t.exp.Spec.Margin)
	for _, c := range t.cells {
		if c.variant.Name != v.Name {
			continue
		}
		base := t.byKey[key{other.Name, c.workload.Name, c.pairs}]
		for _, metric := range Judged(t.exp, c.workload) {
			if _, values := c.series(metric); len(values) == 0 {
				continue // for example, the tool does not report it
			}
			if base == nil {
				return notDominated
			}
			e, _, _, err := t.ratio(c, base, metric)
			if err != nil || e.N < 2 {
				return notDominated
			}
			if !metrics.Get(metric).HigherIsBetter() {
				e.Mean = -e.Mean
			}
			compared = true
			ci := e.Interval()
			switch {
			case ci[0] > 0 && ci[1] > margin: // it is better, and perhaps by more than the margin
				return notDominated
			case ci[1] > margin:
				verdict = seemsDominated
			}
			worse = worse || ci[1] < 0
		}
	}
	if !compared || !worse {
		return notDominated
	}
	return verdict
}
