package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// priced is an experiment with prices in the lab's profile, in that of a variant, and by role.
const priced = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: priced}
spec:
  target: {lab: {nodes: 3, nic: {price: 0.5 EUR}}}
  baseline: plain
  variants:
  - {name: plain}
  - {name: dear, nic: {price: 2.25 EUR}}
  - {name: balanced, path: {balancer: {backends: 4, nics: {proxy: {price: 1 EUR}, backend: {price: 0.125 EUR}}}}}
  workloads:
  - {name: new, connect: {duration: 1s}}
`

func TestPriceOf(t *testing.T) {
	e := parse(t, priced)
	got := map[string]float64{}
	for _, v := range e.Spec.Variants {
		price, currency := e.PriceOf(v)
		if got[v.Name] = price; currency != "EUR" {
			t.Errorf("%s is priced in %q", v.Name, currency)
		}
	}
	// plain and dear have three nodes each; balanced has a client at the profile's price, a
	// proxy and four backends.
	if diff := cmp.Diff(map[string]float64{"plain": 1.5, "dear": 6.75, "balanced": 2}, got); diff != "" {
		t.Errorf("prices (-want +got):\n%s", diff)
	}
	writtenAndRead(t, e.Metadata.Name, e)
	none := parse(t, strings.NewReplacer("nic: {price: 0.5 EUR}", "nic: {mtu: 1500}", ", nic: {price: 2.25 EUR}", "").Replace(priced))
	if price, currency := none.PriceOf(none.Spec.Variants[0]); price != 0 || currency != "" {
		t.Errorf("without a price it is %g %q", price, currency)
	}
}

// TestEqualPrices: sums that are equal on paper compare as equal, although the prices that they
// add differ.
func TestEqualPrices(t *testing.T) {
	const text = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  target: {hosts: [{name: a, price: 0.1 USD}, {name: b, price: 0.2 USD}, {name: c, labels: {type: c}, price: 0.15 USD}, {name: d, labels: {type: c}, price: 0.15 USD}]}
  baseline: ab
  variants: [{name: ab}, {name: cd, hosts: {client: {type: c}, server: {type: c}}}]
  workloads: [{name: stream, stream: {duration: 1s}}]
  series: [{name: s, axis: price, of: [ab, cd]}]
`
	_, err := Parse("test.yaml", []byte(text), nil)
	if want := "spec.series[0].of[1]: variant cd has the same price as ab: 0.3"; err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestPriceErrors(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"0.5 EUR", "0.5", `spec.target.lab.nic.price: must be an amount and its currency such as 0.085 USD, is "0.5"`},
		{"0.5 EUR", "EUR 0.5", `spec.target.lab.nic.price: must be an amount and its currency such as 0.085 USD, is "EUR 0.5"`},
		{"2.25 EUR", "-1 EUR", `spec.variants[1].nic.price: must be an amount and its currency such as 0.085 USD, is "-1 EUR"`},
		{"2.25 EUR", "0.0 EUR", "spec.variants[1].nic.price: must be above 0; what has no price is left out of the comparison"},
		{"2.25 EUR", "2.25 USD", "spec.variants[1].nic.price: must be in EUR, as spec.target.lab.nic.price is, is in USD: slipstream does not convert currencies"},
		{"0.125 EUR", "0.125 CHF", "spec.variants[2].path.balancer.nics.backend.price: must be in EUR, as spec.target.lab.nic.price is, is in CHF"},
	} {
		text := strings.Replace(priced, c.old, c.new, 1)
		if _, err := Parse("experiment.yaml", []byte(text), nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.new, err, c.want)
		}
	}
}

func FuzzPrice(f *testing.F) {
	for _, s := range []string{"", "0.085 USD", "1 EUR", "0 USD", "999999999.999999 XXX", "1e9 USD", "0.0850000 USD"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		amount, currency, err := Price(s).Amount()
		switch {
		case err != nil || s == "":
			if amount != 0 || currency != "" {
				t.Errorf("%q is %g %q, %v", s, amount, currency, err)
			}
		case !(amount > 0 && amount < 1e9) || len(currency) != 3:
			t.Errorf("%q is %g %q", s, amount, currency)
		}
	})
}
