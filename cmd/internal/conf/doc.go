// Package conf reads configuration and policy files.
//
// Configuration is a plain struct of some component, with yaml tags for names
// and, where wanted, a Validate method. The struct knows nothing of YAML. Load
// fills it from, in rising order of precedence, its own present values (the
// defaults), a file, environment variables and flags, and reports every fault
// at once: where it stands (file:line:col, variable or flag), the path of the
// field, what is wrong and what to do.
//
// Reading is strict, because a limit that was silently misread is worse than a
// daemon that does not start: unknown and repeated keys, a second document,
// fractions where whole numbers are meant, numbers with a leading zero, keys
// without a value, anchors and explicit tags are all faults. An empty file is
// not.
//
// Further tags, in the form `conf:"word,word" help:"text"`:
//
//	bytes      an integer that may be written as a size: 64MiB
//	unlimited  an integer or rate for which the word unlimited is allowed; it
//	           reads as the largest value
//	secret     never printed by YAML
//	scalar     the struct may be written as the value of this field alone
//
// LoadPolicies reads the policy file: plans, and tenants that follow them.
package conf

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Position is where a value was written. Line and Col count from 1; zero means
// that they are not known, or that the source has none.
type Position struct {
	Source    string // a file, "environment NAME" or "flag --name"
	Line, Col int
}

func (p Position) String() string {
	switch {
	case p.Line == 0:
		return p.Source
	case p.Col == 0:
		return fmt.Sprintf("%s:%d", p.Source, p.Line)
	}
	return fmt.Sprintf("%s:%d:%d", p.Source, p.Line, p.Col)
}

// Problem is one fault of a file, variable or flag.
type Problem struct {
	At   Position
	Path string // of the field, as "store.path"; empty for the whole file
	What string // what is wrong
	Do   string // what to do

	unknown bool // a name that is not known: likely the cause of other faults
}

func (p Problem) Error() string {
	var b strings.Builder
	if s := p.At.String(); s != "" {
		b.WriteString(s + ": ")
	}
	if p.Path != "" {
		b.WriteString(p.Path + ": ")
	}
	b.WriteString(p.What)
	if p.Do != "" {
		b.WriteString("; " + p.Do)
	}
	return b.String()
}

// Problems is the error of Load and LoadPolicies: all faults, one a line,
// unknown names first, as what they meant to set is missing elsewhere, then the
// others, all in order of position.
type Problems []Problem

func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, one := range p {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "\n")
}

// errOrNil sorts the faults and drops repetitions.
func (p Problems) errOrNil() error {
	if len(p) == 0 {
		return nil
	}
	slices.SortStableFunc(p, func(a, b Problem) int {
		if a.unknown != b.unknown {
			if a.unknown {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.At.Source, b.At.Source), cmp.Compare(a.At.Line, b.At.Line), cmp.Compare(a.At.Col, b.At.Col))
	})
	return slices.Compact(p)
}

// nearest is the name that was probably meant, or "".
func nearest(given string, names []string) string {
	best, least := "", 3
	if len(given) < 4 {
		least = 2
	}
	for _, name := range names {
		if d := distance(strings.ToLower(given), name); d < least {
			best, least = name, d
		}
	}
	return best
}

// distance counts the insertions, deletions, replacements and swaps of
// neighbours that turn a into b.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	var before, last, row [65]int
	for j := range len(b) + 1 {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			differ := 1
			if a[i-1] == b[j-1] {
				differ = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+differ)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}

// suggestion says what to do about an unknown name.
func suggestion(given string, names []string) string {
	if best := nearest(given, names); best != "" {
		return fmt.Sprintf("did you mean %s?", best)
	}
	if len(names) == 0 {
		return "remove it"
	}
	slices.Sort(names)
	if len(names) > 20 {
		names = append(names[:20:20], "...")
	}
	return "known are " + strings.Join(names, ", ")
}
