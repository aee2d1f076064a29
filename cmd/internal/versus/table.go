package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// series are the results of the turns of one side, in order of the turns.
type series []float64

// median is the middle one, or the mean of the two in the middle; 0 of none.
func (s series) median() float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// text is "median (min-max)".
func (s series) text(format string) string {
	if len(s) == 0 {
		return "-"
	}
	f := func(v float64) string { return fmt.Sprintf(format, v) }
	if len(s) == 1 {
		return f(s[0])
	}
	return fmt.Sprintf("%s (%s-%s)", f(s.median()), f(slices.Min(s)), f(slices.Max(s)))
}

// over divides turn by turn; both must have the same number of turns.
func (s series) over(other series) series {
	if len(s) != len(other) {
		panic(fmt.Sprintf("versus: %d turns against %d", len(s), len(other)))
	}
	out := make(series, len(s))
	for i := range s {
		out[i] = s[i] / other[i]
	}
	return out
}

// quantile of sorted values, by nearest rank; q in (0, 1].
func quantile(sorted []int64, q float64) int64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(q*float64(len(sorted))+0.9999999) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// table is printed with its columns in line: the first to the left, the others
// to the right. Its form is that of Markdown, so that it can be put into docs.
type table struct{ rows [][]string }

func newTable(head ...string) *table { return &table{rows: [][]string{head}} }

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(out io.Writer) {
	var width []int
	for _, r := range t.rows {
		for i, c := range r {
			if i == len(width) {
				width = append(width, 0)
			}
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	line := func(cells []string) {
		var b strings.Builder
		for i, w := range width {
			cell := ""
			if i < len(cells) {
				cell = cells[i]
			}
			pad := strings.Repeat(" ", w-utf8.RuneCountInString(cell))
			if i == 0 {
				cell += pad
			} else {
				cell = pad + cell
			}
			b.WriteString("| " + cell + " ")
		}
		fmt.Fprintln(out, b.String()+"|")
	}
	line(t.rows[0])
	rule := make([]string, len(width))
	for i, w := range width {
		rule[i] = strings.Repeat("-", w)
		if i > 0 {
			rule[i] = strings.Repeat("-", w-1) + ":"
		}
	}
	line(rule)
	for _, r := range t.rows[1:] {
		line(r)
	}
}
