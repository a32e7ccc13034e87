package report

// Quantity is a value of a metric, in the unit of record.Units, for people.
func Quantity(v float64, metric string) string {
	q := quantityOf(metric)
	return significant(v*q.scale) + " " + q.unit
}
