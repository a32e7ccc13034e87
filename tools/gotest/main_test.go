package main

import (
	"slices"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const events = `
{"Action":"start","Package":"a"}
{"Action":"run","Package":"a","Test":"TestGood"}
{"Action":"output","Package":"a","Test":"TestGood","Output":"=== RUN   TestGood\n"}
{"Action":"output","Package":"a","Test":"TestGood","Output":"    chatter\n"}
{"Action":"pass","Package":"a","Test":"TestGood","Elapsed":6}
{"Action":"output","Package":"a","Test":"TestBad","Output":"=== RUN   TestBad\n"}
{"Action":"output","Package":"a","Test":"TestBad","Output":"    broken\n"}
{"Action":"fail","Package":"a","Test":"TestBad"}
{"Action":"output","Package":"a","Test":"TestRoot/child","Output":"    a_test.go:7: needs root\n"}
{"Action":"output","Package":"a","Test":"TestRoot/child","Output":"--- SKIP: TestRoot/child (0.00s)\n"}
{"Action":"skip","Package":"a","Test":"TestRoot/child"}
{"Action":"pass","Package":"a","Test":"TestSlow/child","Elapsed":20}
{"Action":"pass","Package":"a","Test":"TestSlow","Elapsed":20.5}
{"Action":"pass","Package":"a","Test":"TestQuick","Elapsed":4.9}
{"Action":"pass","Package":"a","Test":"TestRoot"}
{"Action":"output","Package":"a","Test":"TestData","Output":"    a_test.go:9: no data\n"}
{"Action":"skip","Package":"a","Test":"TestData"}
{"Action":"output","Package":"a","Test":"TestMore","Output":"    a_test.go:7: needs root\n"}
{"Action":"skip","Package":"a","Test":"TestMore"}
{"Action":"output","Package":"a","Output":"PASS\n"}
{"Action":"output","Package":"a","Output":"ok  \ta\t0.1s\n"}
{"Action":"pass","Package":"a"}
{"ImportPath":"b","Action":"build-output","Output":"b.go:1: bad\n"}
{"Action":"output","Package":"d","Test":"TestEnds","Output":"=== RUN   TestEnds\n"}
{"Action":"pass","Package":"d","Test":"TestEnds"}
{"Action":"output","Package":"d","Test":"TestHangs","Output":"=== RUN   TestHangs\n"}
{"Action":"output","Package":"d","Test":"TestHangs","Output":"panic: test timed out after 2s\n"}
{"Action":"output","Package":"dd","Test":"TestOther","Output":"=== RUN   TestOther\n"}
{"Action":"output","Package":"d","Output":"FAIL\td\t2s\n"}
{"Action":"fail","Package":"d"}
{"Action":"pass","Package":"dd","Test":"TestOther"}
{"Action":"skip","Package":"c"}
`
	var out strings.Builder
	skips, failed, times, err := report(&out, strings.NewReader(events))
	if err != nil {
		t.Fatal(err)
	}
	if want := []skip{{"a.TestRoot/child", "needs root"}, {"a.TestData", "no data"}, {"a.TestMore", "needs root"}}; !slices.Equal(skips, want) {
		t.Errorf("skips %q, want %q", skips, want)
	}
	if want := []string{"a.TestBad", "d.TestHangs"}; !slices.Equal(failed, want) {
		t.Errorf("failed %q, want %q", failed, want)
	}
	if got, want := reasons(skips), "2 (needs root), 1 (no data)"; got != want {
		t.Errorf("left out %q, want %q", got, want)
	}
	if got, want := slowest(times), []string{"a.TestSlow", "a.TestGood"}; !slices.Equal(got, want) {
		t.Errorf("slowest %q, want %q", got, want)
	}
	const want = "    broken\nok  \ta\t0.1s\nb.go:1: bad\nFAIL\td\t2s\npanic: test timed out after 2s\n"
	if out.String() != want {
		t.Errorf("shown:\n%s\nwant:\n%s", out.String(), want)
	}
	if _, _, _, err := report(&out, strings.NewReader("go: no such flag")); err == nil {
		t.Error("no error at what is no event")
	}
}
