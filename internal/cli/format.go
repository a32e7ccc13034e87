package cli

import (
	"encoding/json"
	"errors"
	"io"

	"github.com/spf13/pflag"
)

// outputFormat is the flag of commands that print text for people, or JSON for programs.
type outputFormat string

const (
	asText outputFormat = "text"
	asJSON outputFormat = "json"
)

func (o *outputFormat) addFlag(f *pflag.FlagSet) {
	*o = asText
	f.VarP(o, "format", "o", "text or json")
}

// String is a method of pflag.Value.
func (o *outputFormat) String() string { return string(*o) }

// Set is a method of pflag.Value.
func (o *outputFormat) Set(text string) error {
	if *o = outputFormat(text); *o != asText && *o != asJSON {
		return errors.New("there is no such format; choose text or json")
	}
	return nil
}

// Type is a method of pflag.Value.
func (o *outputFormat) Type() string { return "string" }

func writeJSON(w io.Writer, value any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(value)
}
