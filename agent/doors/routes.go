package doors

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"github.com/stipend/stipend/proto/grant"
)

// maxRoutes bounds a route table.
const maxRoutes = 4096

// Route maps requests to a route class.
type Route struct {
	// Pattern is one of net/http's ServeMux: "[METHOD ][HOST]/PATH", with
	// wildcards such as {id} and {rest...}.
	Pattern string           `yaml:"pattern"`
	Class   grant.RouteClass `yaml:"class"`
	// CountHeader names the header with the number of operations. From peers
	// that are not trusted it is ignored; when a trusted peer leaves it out, the
	// request is one operation. Empty: every request is one operation.
	CountHeader string `yaml:"count_header"`
	// MaxCount bounds what that header may say; zero means 1,000,000.
	MaxCount grant.Units `yaml:"max_count"`
}

const defaultMaxCount = 1_000_000

// ServeHTTP makes a Route a handler, which is how ServeMux keeps it; it is
// never served.
func (*Route) ServeHTTP(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }

// Routes is the fixed table of what may be asked for.
type Routes struct{ mux *http.ServeMux }

// NewRoutes builds the table, or names every route that cannot be used.
func NewRoutes(list []Route) (*Routes, error) {
	rs := &Routes{mux: http.NewServeMux()}
	if len(list) == 0 || len(list) > maxRoutes {
		given := strconv.Itoa(len(list))
		if len(list) == 0 {
			given = "none given"
		}
		return nil, fmt.Errorf("routes: %s; allowed: 1 to %d of {pattern, class}", given, maxRoutes)
	}
	var errs []error
	for i, r := range list {
		at := fmt.Sprintf("routes.%d", i)
		if err := r.Class.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("%s.%w", at, err))
		}
		if r.CountHeader != "" && !validHeader(r.CountHeader) {
			errs = append(errs, fmt.Errorf("%s.count_header: %q; allowed: letters, digits and '-'", at, r.CountHeader))
		}
		if r.MaxCount < 0 {
			errs = append(errs, fmt.Errorf("%s.max_count: %d; allowed: 0 (which means %d) or more", at, r.MaxCount, defaultMaxCount))
		}
		if r.MaxCount == 0 {
			r.MaxCount = defaultMaxCount
		}
		r.CountHeader = http.CanonicalHeaderKey(r.CountHeader)
		if err := register(rs.mux, &r); err != nil {
			errs = append(errs, fmt.Errorf("%s.pattern: %w", at, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return rs, nil
}

// CheckTrust refuses routes that read a count when nobody is trusted to send
// one: the header would be ignored and every request cost one operation.
func CheckTrust(list []Route, id IdentityConfig) error {
	for i, r := range list {
		if r.CountHeader != "" && len(id.TrustedPeers) == 0 {
			return fmt.Errorf("identity.trusted_peers: none; allowed: the CIDRs whose %s is believed (routes.%d.count_header)", r.CountHeader, i)
		}
	}
	return nil
}

// ourSource is where ServeMux says a pattern comes from: a line of this file.
var ourSource = regexp.MustCompile(` \(registered at [^\n)]*\)`)

// register turns ServeMux's panic, its only way to refuse, into an error.
func register(mux *http.ServeMux, r *Route) (err error) {
	defer func() {
		if p := recover(); p != nil {
			why := ourSource.ReplaceAllString(fmt.Sprint(p), "")
			err = fmt.Errorf("%q: %s", r.Pattern, strings.ReplaceAll(why, "\n", " "))
		}
	}()
	mux.Handle(r.Pattern, r)
	return nil
}

// match finds the route of a request: its Method, Host and URL count. Paths
// that the backend might read another way match nothing, or a caller could name
// a cheap route and be served by a dear one: "//" and "/../", dot segments
// however they are written, and an encoded slash that makes another route of it.
func (rs *Routes) match(r *http.Request) (*Route, bool) {
	if r.URL == nil || r.URL.Path == "" || r.Method == http.MethodConnect || dotted(r.URL.Path) {
		return nil, false
	}
	h, _ := rs.mux.Handler(r)
	route, ok := h.(*Route) // everything else redirects or says 404 or 405
	if ok && r.URL.RawPath != "" {
		decoded := *r.URL
		decoded.RawPath = ""
		h, _ := rs.mux.Handler(&http.Request{Method: r.Method, Host: r.Host, URL: &decoded})
		if other, found := h.(*Route); found && other != route {
			return nil, false
		}
	}
	return route, ok
}

// dotted reports whether a decoded path has a segment "." or "..", also for
// backends that take a backslash for a slash or cut parameters off ("..;x").
func dotted(path string) bool {
	if !strings.Contains(path, ".") {
		return false
	}
	for segment := range strings.FieldsFuncSeq(path, func(r rune) bool { return r == '/' || r == '\\' }) {
		segment, _, _ = strings.Cut(segment, ";")
		if segment == "." || segment == ".." {
			return true
		}
	}
	return false
}

// count reads the number of operations: one when there is no header, or when
// it is not a trusted peer's.
func (r *Route) count(h http.Header, trusted bool) (grant.Units, error) {
	if r.CountHeader == "" || !trusted {
		return 1, nil
	}
	v := h[r.CountHeader]
	if len(v) == 0 {
		return 1, nil
	}
	n, err := strconv.ParseInt(v[0], 10, 64)
	if err != nil || len(v) > 1 || n < 0 || grant.Units(n) > r.MaxCount {
		return 0, fmt.Errorf("%s must be one whole number from 0 to %d", r.CountHeader, r.MaxCount)
	}
	return grant.Units(n), nil
}
