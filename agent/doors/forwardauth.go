package doors

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/stipend/stipend/proto/grant"
)

// Source says where a gateway puts the request that it asks about. There is no
// guessing: only the operator knows which headers the gateway overwrites, and
// all others are the client's to choose.
type Source string

const (
	// XForwarded: X-Forwarded-Method, -Uri and, where it is there, -Host (Caddy,
	// Traefik).
	XForwarded Source = "x-forwarded"
	// XOriginal: X-Original-Method and X-Original-URI (nginx).
	XOriginal Source = "x-original"
	// FromRequest: the method and path of the request itself (Envoy ext_authz).
	FromRequest Source = "request"
)

// Validate says what is allowed.
func (s Source) Validate() error {
	switch s {
	case XForwarded, XOriginal, FromRequest:
		return nil
	}
	given := "not given"
	if s != "" {
		given = strconv.Quote(string(s))
	}
	return fmt.Errorf("source: %s; allowed: %s (Caddy, Traefik), %s (nginx), %s (Envoy)", given, XForwarded, XOriginal, FromRequest)
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

// asked rebuilds method, host and URL of the request that the gateway holds,
// from the source alone: no other header counts, whatever it says. What is
// missing is an error and never a guess: a method, say, that counted as GET.
func asked(r *http.Request, source Source, prefix string) (*http.Request, error) {
	if source == FromRequest {
		u := *r.URL
		u.Path = strings.TrimPrefix(u.Path, prefix)
		u.RawPath = strings.TrimPrefix(u.RawPath, prefix)
		return &http.Request{Method: r.Method, Host: r.Host, URL: &u}, nil
	}
	method, uri, host := "X-Original-Method", "X-Original-Uri", ""
	if source == XForwarded {
		method, uri, host = "X-Forwarded-Method", "X-Forwarded-Uri", "X-Forwarded-Host"
	}
	t := &http.Request{Host: r.Host}
	var err error
	if t.Method, err = only(r.Header, method); err != nil {
		return nil, err
	}
	raw, err := only(r.Header, uri)
	if err != nil {
		return nil, err
	}
	if host != "" && len(r.Header[host]) > 0 {
		if t.Host, err = only(r.Header, host); err != nil {
			return nil, err
		}
	}
	if t.URL, err = url.ParseRequestURI(raw); err != nil {
		return nil, fmt.Errorf("the URI in %s cannot be read", uri)
	}
	return t, nil
}

// only is the value of a header that must be there once.
func only(h http.Header, name string) (string, error) {
	v := h[name]
	switch {
	case len(v) == 0 || v[0] == "":
		return "", fmt.Errorf("the gateway did not send %s, by which it names the request", name)
	case len(v) > 1:
		return "", fmt.Errorf("%s names the request and is there more than once", name)
	}
	return v[0], nil
}
