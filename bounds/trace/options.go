package trace

import (
	"fmt"
	"strings"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Kind is the format of an input.
type Kind uint8

const (
	Admissions Kind = iota // records of admissions, see the package
	Combined               // Apache's and nginx's combined or common log
	JSONLines
	CSV
)

var kindNames = []string{"admissions", "combined", "jsonl", "csv"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// ParseKind reads what String writes.
func ParseKind(s string) (Kind, error) {
	if i, ok := indexOf(kindNames, s); ok {
		return Kind(i), nil
	}
	return 0, fmt.Errorf("trace: kind: %q; allowed: %s", s, strings.Join(kindNames, ", "))
}

// Columns says which field of an access log is what. An empty name means that
// the log has none. Combined has the columns client, ident, user, time,
// request, method, target, path (the target without its query), protocol,
// status, bytes, referer, agent, and extra1 ... for what follows; for it, empty
// Time, Tenant, Status, Method and Path stand for time, client, status, method
// and path.
type Columns struct {
	Time     string // required
	TimeForm TimeForm

	Tenant   string // a column, or
	TenantIs grant.TenantID

	// Cost lists columns whose sum is the cost, in whole units. Without any,
	// Options.Price or 1 is.
	Cost []string

	Class   string // a column; else Options.Class of method and path; else
	ClassIs grant.RouteClass
	Method  string
	Path    string

	Owner   string // a column, or
	OwnerIs grant.Owner

	Status string // of HTTP: says with Options.Admitted whether the line counts

	// Duration is a column to be taken off the time, because the log has the end
	// of requests and the admission was at the start; in units of DurationUnit
	// (1 s if zero), decimals allowed.
	Duration     string
	DurationUnit time.Duration
}

// DefaultClass is the route class of a request that no mapping names.
const DefaultClass grant.RouteClass = "request"

// Options holds the settings of a Reader. The zero value reads Admissions in
// order of time, and Combined.
type Options struct {
	File    string // for errors
	Columns Columns

	// Admitted says by its status whether a request was admitted. Nil: every
	// status but 429 and 503.
	Admitted func(status int) bool
	// Class maps a request to its route class; false leaves the line out, counted
	// as Unmapped. Nil: Columns.ClassIs, or DefaultClass.
	Class func(method, path string) (grant.RouteClass, bool)
	// Price is the cost of a class when Columns.Cost is empty; false leaves the
	// line out, counted as Unmapped. Nil: 1.
	Price func(grant.RouteClass) (grant.Units, bool)

	Location *time.Location // of times without a zone; nil: UTC
	Comma    byte           // of CSV; 0: ','
	// Resolution of the times; 0: as the first record is written.
	Resolution time.Duration

	// Window is by how much a record may be older than the newest one before it.
	Window time.Duration
	// MaxHeld bounds the records held back to sort them; 0: 65,536.
	MaxHeld int
	// MaxLine bounds a line in bytes; 0: 64 KiB. 256 B to 16 MiB.
	MaxLine int
	// SkipBad is how many malformed lines of an access log are left out,
	// counted, before one is an error.
	SkipBad int64
}

func (o *Options) complete(kind Kind) error {
	if o.File == "" {
		o.File = "input"
	}
	if o.Location == nil {
		o.Location = time.UTC
	}
	if o.Admitted == nil {
		o.Admitted = func(status int) bool { return status != 429 && status != 503 }
	}
	setIfZero(&o.Comma, ',')
	setIfZero(&o.MaxHeld, 1<<16)
	setIfZero(&o.MaxLine, 64<<10)
	setIfZero(&o.Columns.DurationUnit, time.Second)
	bad := func(field string, given any, allowed string) error {
		return fmt.Errorf("trace: %s: %v; allowed: %s", field, given, allowed)
	}
	switch {
	case int(kind) >= len(kindNames):
		return bad("kind", kind, strings.Join(kindNames, ", "))
	case o.Window < 0:
		return bad("window", o.Window, "0s or more")
	case o.Resolution < 0:
		return bad("resolution", o.Resolution, "0s or more")
	case o.MaxHeld < 1:
		return bad("max held", o.MaxHeld, "1 or more records")
	case o.MaxLine < 256 || o.MaxLine > 16<<20:
		return bad("max line", o.MaxLine, "256 to 16777216 bytes")
	case o.SkipBad < 0:
		return bad("skip bad", o.SkipBad, "0 or more lines")
	case o.Comma == '"' || o.Comma == '\n' || o.Comma == '\r':
		return bad("comma", fmt.Sprintf("%q", o.Comma), "any byte but a quote or the end of a line")
	case o.Columns.DurationUnit < 0:
		return bad("duration unit", o.Columns.DurationUnit, "1ns or more")
	case int(o.Columns.TimeForm) >= len(timeFormNames):
		return bad("time form", o.Columns.TimeForm, strings.Join(timeFormNames, ", "))
	}
	if kind == Admissions {
		return nil
	}
	c := &o.Columns
	if kind == Combined {
		setIfZero(&c.Time, "time")
		if c.TenantIs == "" {
			setIfZero(&c.Tenant, "client")
		}
		setIfZero(&c.Status, "status")
		setIfZero(&c.Method, "method")
		setIfZero(&c.Path, "path")
		if c.Time == "time" {
			c.TimeForm = CombinedTime
		}
	}
	setIfZero(&c.ClassIs, DefaultClass)
	switch {
	case c.Time == "":
		return bad("time column", "none", "the name of a column")
	case (c.Tenant == "") == (c.TenantIs == ""):
		return bad("tenant column and constant", fmt.Sprintf("%q and %q", c.Tenant, c.TenantIs), "one of them")
	case c.Owner != "" && c.OwnerIs != "":
		return bad("owner column and constant", fmt.Sprintf("%q and %q", c.Owner, c.OwnerIs), "one of them")
	case c.Class != "" && o.Class != nil:
		return bad("class column", c.Class, "none together with a mapping of method and path")
	case o.Class != nil && (c.Method == "" || c.Path == ""):
		return bad("method and path columns", fmt.Sprintf("%q and %q", c.Method, c.Path), "both, for the mapping to route classes")
	}
	return nil
}

func setIfZero[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// names lists the columns in use, for a check against the header.
func (c *Columns) names(mapped bool) []string {
	all := append([]string{c.Time, c.Tenant, c.Class, c.Owner, c.Status, c.Duration}, c.Cost...)
	if mapped {
		all = append(all, c.Method, c.Path)
	}
	var out []string
	for _, n := range all {
		if n != "" {
			out = append(out, n)
		}
	}
	return out
}
