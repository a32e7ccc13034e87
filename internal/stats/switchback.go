package stats

// periodsApart returns, for each block, the number of periods by which a cell comes
// after its baseline.
func periodsApart(c, base *cell, blocks []int) []float64 {
	apart := make([]float64, len(blocks))
	for i, b := range blocks {
		apart[i] = float64(c.trials[b-1][0].Period - base.trials[b-1][0].Period)
	}
	return apart
}
