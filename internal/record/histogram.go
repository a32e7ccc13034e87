package record

import (
	"encoding/base64"
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// NewHistogram returns an empty histogram of latencies in nanoseconds: up to 30 s, with
// three significant digits.
func NewHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, int64(30*time.Second), 3)
}

// EncodeHistogram returns the text for Trial.Latency and Endpoint.Latency.
func EncodeHistogram(h *hdrhistogram.Histogram) (string, error) {
	b, err := h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	if err != nil {
		return "", fmt.Errorf("encode histogram: %w", err)
	}
	return string(b), nil
}

// DecodeHistogram reads the text of EncodeHistogram.
func DecodeHistogram(text string) (*hdrhistogram.Histogram, error) {
	if _, err := base64.StdEncoding.DecodeString(text); err != nil {
		return nil, fmt.Errorf("decode histogram: %w", err)
	}
	h, err := hdrhistogram.Decode([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("decode histogram: %w", err)
	}
	return h, nil
}
