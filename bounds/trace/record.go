package trace

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stipend/stipend/proto/grant"
)

// Path is where an admission was decided. The first four are in the order of
// the agent's own.
type Path uint8

const (
	Local     Path = iota // from the wallet
	Central               // by a Check at the authority
	Emergency             // from emergency grants
	Off                   // mode off or shadow let it pass
	Unstated              // an access log does not say
)

var pathNames = []string{"local", "central", "emergency", "off", "unstated"}

func (p Path) String() string {
	if int(p) < len(pathNames) {
		return pathNames[p]
	}
	return fmt.Sprintf("path(%d)", uint8(p))
}

// Stage is the moment whose time was recorded.
type Stage uint8

const (
	Decision  Stage = iota // the clock reading that the decision compared
	Forwarded              // right before the first byte went out
)

var stageNames = []string{"decision", "forwarded"}

func (s Stage) String() string {
	if int(s) < len(stageNames) {
		return stageNames[s]
	}
	return fmt.Sprintf("stage(%d)", uint8(s))
}

// Record is one admission.
type Record struct {
	At     grant.Instant // ns of the header's clock; since 1970 in access logs
	Tenant grant.TenantID
	Class  grant.RouteClass
	Cost   grant.Units // 0 or more
	Owner  grant.Owner // the gateway; may be empty
	Path   Path
	Stage  Stage

	// Where it was read; not written.
	File string
	Line int64 // from 1
}

// fault is a field that does not fit; the reader adds file and line.
type fault struct{ field, given, allowed string }

func (f *fault) Error() string { return f.field + ": " + f.given + "; allowed: " + f.allowed }

// validate names the first field that cannot be recorded.
func (r *Record) validate() *fault {
	if err := r.Tenant.Validate(); err != nil {
		return &fault{"tenant", err.Error(), fmt.Sprintf("1 to %d bytes of UTF-8 without control characters", grant.MaxTenantLen)}
	}
	if err := r.Class.Validate(); err != nil {
		return &fault{"class", err.Error(), fmt.Sprintf("1 to %d letters, digits, '-', '_' and '.'", grant.MaxClassLen)}
	}
	if r.Owner != "" {
		if err := r.Owner.Validate(); err != nil {
			return &fault{"owner", err.Error(), fmt.Sprintf("0 to %d bytes of UTF-8 without control characters", grant.MaxOwnerLen)}
		}
	}
	switch {
	case r.Cost < 0:
		return &fault{"cost", fmt.Sprint(int64(r.Cost)), "0 or more units"}
	case int(r.Path) >= len(pathNames):
		return &fault{"path", r.Path.String(), strings.Join(pathNames, ", ")}
	case int(r.Stage) >= len(stageNames):
		return &fault{"stage", r.Stage.String(), strings.Join(stageNames, ", ")}
	}
	return nil
}

// Error is a fault of the input, for people: where it is, what was given and
// what is allowed.
type Error struct {
	File    string
	Line    int64  // from 1; 0: the file as a whole
	Field   string // may be empty
	Given   string
	Allowed string // or what to do
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	b.WriteString(": ")
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Given + "; allowed: " + e.Allowed)
	return b.String()
}

// short quotes a piece of input for an error.
func short(s string) string {
	if len(s) > 80 {
		return fmt.Sprintf("%q...", s[:80])
	}
	return fmt.Sprintf("%q", s)
}

func indexOf(names []string, s string) (int, bool) {
	i := slices.Index(names, s)
	return i, i >= 0
}
