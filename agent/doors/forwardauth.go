package doors

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/stipend/stipend/proto/grant"
)

// Source says where a gateway puts the request that it asks about.
type Source string

const (
	// Auto takes whichever headers are there, X-Original-URI first, and
	// refuses a request in which the two families disagree: then one of them
	// comes from the client. Without either it is FromRequest.
	Auto Source = "auto"
	// XForwarded: X-Forwarded-Method, -Uri and -Host (Caddy, Traefik).
	XForwarded Source = "x-forwarded"
	// XOriginal: X-Original-Method and X-Original-URI (nginx).
	XOriginal Source = "x-original"
	// FromRequest: the method and path of the request itself (Envoy ext_authz).
	FromRequest Source = "request"
)

var sources = []Source{Auto, XForwarded, XOriginal, FromRequest}

// Validate says what is allowed.
func (s Source) Validate() error {
	if slices.Contains(sources, s) {
		return nil
	}
	return fmt.Errorf("source: %q; allowed: %s, %s, %s, %s", s, Auto, XForwarded, XOriginal, FromRequest)
}

// ForwardAuth answers gateways that ask before they forward: 200 lets the
// request pass, everything else is the answer for the client. prefix is removed
// from the path when the request itself is what is asked about.
func (d *Door) ForwardAuth(source Source, prefix string) (http.Handler, error) {
	if err := source.Validate(); err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		target, err := asked(r, source, prefix)
		if err != nil {
			plain(http.StatusBadRequest, grant.Invalid.String(), err.Error()).write(w)
			return
		}
		req, ok := d.who(w, r, target)
		if !ok {
			return
		}
		dec, ok := d.judge(w, r, req)
		if !ok {
			return
		}
		if !d.gate.Recheck(dec) {
			d.tooLate().write(w)
			return
		}
		w.Header().Set("Cache-Control", "no-store")
		d.pass(w.Header(), dec)
		w.WriteHeader(http.StatusOK)
	}), nil
}

// requestNames are the headers in which a gateway names the request.
var requestNames = []string{"X-Forwarded-Uri", "X-Forwarded-Method", "X-Forwarded-Host", "X-Original-Uri", "X-Original-Method"}

// asked rebuilds method, host and URL of the request that the gateway holds.
func asked(r *http.Request, source Source, prefix string) (*http.Request, error) {
	for _, name := range requestNames {
		if len(r.Header[name]) > 1 {
			return nil, errors.New("a header that names the request appears more than once")
		}
	}
	forwarded, original := r.Header["X-Forwarded-Uri"], r.Header["X-Original-Uri"]
	if source == Auto {
		switch {
		case len(original) == 1 && len(forwarded) == 1:
			// One family is the client's. It must not say anything else, and must
			// not win by what it leaves out: a method, say, that counts as GET then.
			t, err := asked(r, XOriginal, prefix)
			if err != nil {
				return nil, err
			}
			u, err := asked(r, XForwarded, prefix)
			if err != nil {
				return nil, err
			}
			if original[0] != forwarded[0] || t.Method != u.Method || t.Host != u.Host {
				return nil, errors.New("the headers X-Original-* and X-Forwarded-* disagree")
			}
			return t, nil
		case len(original) == 1:
			source = XOriginal
		case len(forwarded) == 1:
			source = XForwarded
		default:
			source = FromRequest
		}
	}
	t := &http.Request{Method: r.Method, Host: r.Host}
	var uri []string
	switch source {
	case XForwarded:
		uri = forwarded
		if m := r.Header["X-Forwarded-Method"]; len(m) > 0 {
			t.Method = m[0]
		}
		if h := r.Header["X-Forwarded-Host"]; len(h) > 0 {
			t.Host = h[0]
		}
	case XOriginal:
		uri = original
		if m := r.Header["X-Original-Method"]; len(m) > 0 {
			t.Method = m[0]
		}
	default:
		u := *r.URL
		u.Path = strings.TrimPrefix(u.Path, prefix)
		u.RawPath = strings.TrimPrefix(u.RawPath, prefix)
		t.URL = &u
		return t, nil
	}
	if len(uri) == 0 {
		return nil, fmt.Errorf("the headers of source %q are missing", source)
	}
	u, err := url.ParseRequestURI(uri[0])
	if err != nil {
		return nil, errors.New("the URI of the request cannot be read")
	}
	t.URL = u
	return t, nil
}
