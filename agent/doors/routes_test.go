package doors

import (
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/stipend/stipend/proto/grant"
)

func table(t testing.TB) *Routes {
	rs, err := NewRoutes([]Route{
		{Pattern: "POST /v1/chat/{id}", Class: "chat", CountHeader: "X-Tokens", MaxCount: 1000},
		{Pattern: "GET /v1/items/{rest...}", Class: "read"},
		{Pattern: "POST /v1/dear", Class: "dear"},
		{Pattern: "POST /{one}", Class: "one"},
		{Pattern: "api.example.com/", Class: "host"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

// Patterns match as in ServeMux; what would be redirected, and everything
// else, has no class.
func TestMatch(t *testing.T) {
	rs := table(t)
	for _, c := range []struct {
		method, host, uri string
		class             grant.RouteClass
	}{
		{"POST", "x", "/v1/chat/1", "chat"},
		{"POST", "x", "/v1/chat/a%2Fb?q=1", "chat"},
		{"GET", "x", "/v1/chat/1", ""},
		{"POST", "x", "/v1/chat/", ""},
		{"POST", "x", "/v1//chat/1", ""},
		{"POST", "x", "/v1/x/../chat/1", ""},
		{"GET", "x", "/v1/items/a/b", "read"},
		{"HEAD", "x", "/v1/items/a", "read"},
		{"DELETE", "api.example.com:8080", "/any", "host"},
		{"CONNECT", "api.example.com", "/any", ""},
		{"GET", "x", "/", ""},
		// A backend that decodes these serves another path than was priced.
		{"GET", "x", "/v1/items/%2e%2e/chat/1", ""},
		{"GET", "x", "/v1/items/.%2E/chat/1", ""},
		{"GET", "x", "/v1/items/..%2fchat/1", ""},
		{"GET", "x", "/v1/items/%2e/a", ""},
		{"GET", "x", "/v1/items/..;/chat/1", ""},
		{"GET", "x", "/v1/items/..%5cchat", ""},
		{"POST", "x", "/v1%2Fdear", ""},
		{"POST", "x", "/a%2Fb", "one"},
		{"GET", "x", "/v1/items/a..b/...", "read"},
		{"GET", "x", "/v1/items/a%20b/.well-known", "read"},
	} {
		u, err := url.ParseRequestURI(c.uri)
		if err != nil {
			t.Fatal(err)
		}
		r, ok := rs.match(&http.Request{Method: c.method, Host: c.host, URL: u})
		var got grant.RouteClass
		if ok {
			got = r.Class
		}
		if got != c.class {
			t.Errorf("%s %s%s: %q; want %q", c.method, c.host, c.uri, got, c.class)
		}
	}
}

// Every faulty route is named.
func TestRouteFaults(t *testing.T) {
	_, err := NewRoutes([]Route{
		{Pattern: "GET /a/{x", Class: "a"},
		{Pattern: "GET /b", Class: "not ok"},
		{Pattern: "GET /c/{x}", Class: "c"},
		{Pattern: "GET /c/{y}", Class: "c"},
		{Pattern: "GET /d", Class: "d", MaxCount: -1, CountHeader: "a b"},
		{Class: "e"},
	})
	for _, want := range []string{"routes.0.pattern", "routes.1.class", "routes.3.pattern", "routes.4.max_count", "routes.4.count_header", "routes.5.pattern"} {
		if err == nil || !strings.Contains(err.Error(), want+":") {
			t.Errorf("%s is not named in %v", want, err)
		}
	}
	if strings.Contains(err.Error(), ".go") || !strings.Contains(err.Error(), `pattern "GET /c/{y}" conflicts with pattern "GET /c/{x}": GET /c/{y} matches`) {
		t.Errorf("two patterns conflict: %v", err)
	}
	const want = "routes: none given; allowed: 1 to 4096 of {pattern, class}"
	if _, err := NewRoutes(nil); err == nil || err.Error() != want {
		t.Errorf("a table without routes: %v", err)
	}
}

// A route that reads a count needs somebody who is believed.
func TestCheckTrust(t *testing.T) {
	list := []Route{{Pattern: "/a", Class: "a"}, {Pattern: "/b", Class: "b", CountHeader: "X-Tokens"}}
	const want = "identity.trusted_peers: none; allowed: the CIDRs whose X-Tokens is believed (routes.1.count_header)"
	if err := CheckTrust(list, IdentityConfig{}); err == nil || err.Error() != want {
		t.Errorf("nobody is trusted: %v", err)
	}
	if err := CheckTrust(list, IdentityConfig{TrustedPeers: []string{"127.0.0.1/32"}}); err != nil {
		t.Error(err)
	}
	if err := CheckTrust(list[:1], IdentityConfig{}); err != nil {
		t.Error(err)
	}
}

// A count counts from trusted peers only, and within its bound.
func TestCount(t *testing.T) {
	r := &Route{CountHeader: "X-Tokens", MaxCount: 1000}
	for _, c := range []struct {
		v       []string
		trusted bool
		n       grant.Units
		bad     bool
	}{
		{nil, true, 1, false}, {[]string{"7"}, true, 7, false}, {[]string{"7"}, false, 1, false},
		{[]string{"0"}, true, 0, false}, {[]string{"1000"}, true, 1000, false}, {[]string{"1001"}, true, 0, true},
		{[]string{"-1"}, true, 0, true}, {[]string{"1.5"}, true, 0, true}, {[]string{"1", "2"}, true, 0, true},
		{[]string{"9223372036854775808"}, true, 0, true}, {[]string{""}, true, 0, true},
	} {
		n, err := r.count(http.Header{"X-Tokens": c.v}, c.trusted)
		if n != c.n || (err != nil) != c.bad {
			t.Errorf("%q, trusted %v: %d, %v", c.v, c.trusted, n, err)
		}
	}
}

// Who a request is: keys from anybody, the header from trusted peers only, and
// never two tenants at once.
func TestIdentity(t *testing.T) {
	ring, err := parseKeys("f", []byte(line("k1", "acme")+line("k2", "beta")+line("k3", "acme")))
	if err != nil {
		t.Fatal(err)
	}
	keys := &Keys{}
	keys.cur.Store(&ring)
	id := &Identity{keys: keys, header: "X-Tenant", trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	h := func(kv ...string) http.Header {
		out := http.Header{}
		for i := 0; i < len(kv); i += 2 {
			out.Add(kv[i], kv[i+1])
		}
		return out
	}
	for _, c := range []struct {
		what string
		h    http.Header
		peer string
		want grant.TenantID
	}{
		{"bearer", h("Authorization", "Bearer k1"), "1.2.3.4:5", "acme"},
		{"bearer, other case", h("authorization", "bearer  k1"), "1.2.3.4:5", "acme"},
		{"key header", h("X-API-Key", "k2"), "1.2.3.4:5", "beta"},
		{"wrong key", h("X-API-Key", "k9"), "1.2.3.4:5", ""},
		{"none", h(), "10.1.1.1:5", ""},
		{"basic beside a key", h("Authorization", "Basic abc", "X-API-Key", "k2"), "1.2.3.4:5", "beta"},
		{"two tenants", h("Authorization", "Bearer k1", "X-API-Key", "k2"), "1.2.3.4:5", ""},
		{"two keys of one", h("Authorization", "Bearer k1", "X-API-Key", "k3"), "1.2.3.4:5", "acme"},
		{"one wrong", h("Authorization", "Bearer k1", "X-API-Key", "k9"), "1.2.3.4:5", ""},
		{"header, trusted", h("X-Tenant", "gamma"), "10.1.1.1:5", "gamma"},
		{"header, mapped address", h("X-Tenant", "gamma"), "[::ffff:10.1.1.1]:5", "gamma"},
		{"header, stranger", h("X-Tenant", "gamma"), "1.2.3.4:5", ""},
		{"header, stranger behind a trusted name", h("X-Tenant", "gamma", "X-Forwarded-For", "10.1.1.1"), "1.2.3.4:5", ""},
		{"header, stranger with a key", h("X-Tenant", "gamma", "X-API-Key", "k1"), "1.2.3.4:5", "acme"},
		{"header twice", h("X-Tenant", "gamma", "X-Tenant", "delta"), "10.1.1.1:5", ""},
		{"header with a NUL", h("X-Tenant", "a\x00"), "10.1.1.1:5", ""},
		{"header, empty", h("X-Tenant", ""), "10.1.1.1:5", ""},
		{"unix socket", h("X-Tenant", "gamma"), "@", ""},
		{"key too long", h("X-API-Key", strings.Repeat("x", 1<<20)), "1.2.3.4:5", ""},
	} {
		got, ok := id.tenant(c.h, c.peer)
		if ok != (c.want != "") || ok && got != c.want {
			t.Errorf("%s: %q, %v; want %q", c.what, got, ok, c.want)
		}
	}
	err = IdentityConfig{TenantHeader: "a b", TrustedPeers: []string{"10.0.0.1"}}.Validate()
	for _, want := range []string{"tenant_header:", "trusted_peers.0:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not named in %v", want, err)
		}
	}
}

// What a gateway asks about is rebuilt from the headers of the chosen source
// and from nothing else, because a client can send all others; what is missing
// or given twice is refused and never guessed.
func TestAsked(t *testing.T) {
	type h = map[string]string
	for _, c := range []struct {
		what   string
		source Source
		h      h
		want   string
	}{
		{"caddy", XForwarded, h{"X-Forwarded-Method": "POST", "X-Forwarded-Uri": "/a?b", "X-Forwarded-Host": "h"}, "POST h/a"},
		{"caddy, client sends the other family", XForwarded, h{"X-Forwarded-Method": "POST", "X-Forwarded-Uri": "/a", "X-Original-Method": "GET", "X-Original-Uri": "/cheap"}, "POST gw/a"},
		{"caddy without a method", XForwarded, h{"X-Forwarded-Uri": "/a", "X-Original-Method": "GET"}, "error"},
		{"caddy without a URI", XForwarded, h{"X-Forwarded-Method": "POST", "X-Original-Uri": "/cheap"}, "error"},
		{"caddy, empty method", XForwarded, h{"X-Forwarded-Method": "", "X-Forwarded-Uri": "/a"}, "error"},
		{"nginx", XOriginal, h{"X-Original-Method": "POST", "X-Original-Uri": "/a"}, "POST gw/a"},
		{"nginx, client forges", XOriginal, h{"X-Original-Method": "POST", "X-Original-Uri": "/a", "X-Forwarded-Method": "GET", "X-Forwarded-Uri": "/cheap", "X-Forwarded-Host": "h"}, "POST gw/a"},
		{"nginx without a method", XOriginal, h{"X-Original-Uri": "/a"}, "error"},
		{"nginx without a method, client sends one", XOriginal, h{"X-Original-Uri": "/a", "X-Forwarded-Method": "GET"}, "error"},
		{"nothing, though the request has a path", XOriginal, nil, "error"},
		{"envoy", FromRequest, nil, "PUT gw/v1"},
		{"envoy, client forges", FromRequest, h{"X-Original-Method": "GET", "X-Original-Uri": "/cheap", "X-Forwarded-Method": "GET", "X-Forwarded-Uri": "/cheap", "X-Forwarded-Host": "h"}, "PUT gw/v1"},
		{"no URI", XForwarded, h{"X-Forwarded-Method": "GET", "X-Forwarded-Uri": "::"}, "error"},
	} {
		r := &http.Request{Method: "PUT", Host: "gw", URL: &url.URL{Path: "/auth/v1"}, Header: http.Header{}}
		for k, v := range c.h {
			r.Header.Set(k, v)
		}
		got := "error"
		if to, err := asked(r, c.source, "/auth"); err == nil {
			got = to.Method + " " + to.Host + to.URL.Path
		}
		if got != c.want {
			t.Errorf("%s: %s; want %s", c.what, got, c.want)
		}
	}
	for _, name := range []string{"X-Forwarded-Method", "X-Forwarded-Uri", "X-Forwarded-Host"} {
		r := &http.Request{Method: "GET", Host: "gw", Header: http.Header{"X-Forwarded-Uri": {"/a"}, "X-Forwarded-Method": {"GET"}}}
		r.Header[name] = []string{"/a", "/b"}
		if _, err := asked(r, XForwarded, ""); err == nil {
			t.Errorf("%s given twice", name)
		}
	}
}

// The sources are named with the gateways that use them; there is no default.
func TestSource(t *testing.T) {
	const allowed = "; allowed: x-forwarded (Caddy, Traefik), x-original (nginx), request (Envoy)"
	for given, want := range map[Source]string{"": "source: not given" + allowed, "auto": `source: "auto"` + allowed} {
		if err := given.Validate(); err == nil || err.Error() != want {
			t.Errorf("%q: %v", given, err)
		}
		if _, err := (&Door{}).ForwardAuth(given, ""); err == nil {
			t.Errorf("%q opens a door", given)
		}
	}
}

// Whatever pattern an operator writes and whatever a client asks for: an error
// or a table, and never a panic.
func FuzzRoutes(f *testing.F) {
	f.Add("GET /a/{b...}", "GET", "h", "/a/b/c")
	f.Add("/{$}", "POST", "", "//")
	f.Add("{", "", "", "*")
	f.Fuzz(func(t *testing.T, pattern, method, host, uri string) {
		rs, err := NewRoutes([]Route{{Pattern: pattern, Class: "c"}})
		if err != nil {
			return
		}
		u, err := url.ParseRequestURI(uri)
		if err != nil {
			return
		}
		if r, ok := rs.match(&http.Request{Method: method, Host: host, URL: u}); ok && r.Class != "c" {
			t.Errorf("matched %q", r.Class)
		}
	})
}
