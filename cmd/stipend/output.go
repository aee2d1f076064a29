package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"
)

// output is the form that every command answers in.
type output struct{ form string }

func (o *output) register(fs *pflag.FlagSet) {
	fs.StringVarP(&o.form, "output", "o", "table", "form of the answer: table, or json for scripts")
}

func (o *output) validate() error {
	if o.form != "table" && o.form != "json" {
		return badInputf("--output: %q; allowed are table and json", o.form)
	}
	return nil
}

func (o *output) json() bool { return o.form == "json" }

// writeJSON writes v as one indented document, and no HTML escapes.
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// table lines up rows; the last column is free.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, head ...string) *table {
	t := &table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	if len(head) > 0 {
		t.row(toAny(head)...)
	}
	return t
}

func toAny(list []string) []any {
	out := make([]any, len(list))
	for i, s := range list {
		out[i] = s
	}
	return out
}

func (t *table) row(cells ...any) {
	line := make([]string, len(cells))
	for i, c := range cells {
		line[i] = strings.NewReplacer("\t", " ", "\n", " ").Replace(fmt.Sprint(c))
	}
	fmt.Fprintln(t.w, strings.Join(line, "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// wrap breaks a sentence into lines of at most width bytes, each after the
// first behind the indent.
func wrap(s string, width int, indent string) string {
	var b strings.Builder
	at := 0
	for _, word := range strings.Fields(s) {
		switch {
		case at == 0:
		case at+1+len(word) > width:
			b.WriteString("\n" + indent)
			at = len(indent)
		default:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at += len(word)
	}
	return b.String()
}

// plural is "1 unit", "2 units".
func plural[T ~int | ~int64 | ~uint64](n T, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

// percent writes parts per million as a percentage, rounded down.
func percent(ppm int64) string { return fmt.Sprintf("%d.%02d %%", ppm/10_000, ppm%10_000/100) }
