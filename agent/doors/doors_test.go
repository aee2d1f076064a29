package doors

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/agent/link/linktest"
	"github.com/stipend/stipend/proto/grant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a door on a running gate with a fake authority. Its clock is the
// real one plus step.
type rig struct {
	a    *linktest.Authority
	g    *gate.Gate
	d    *Door
	step atomic.Int64
}

func newRig(t testing.TB, change func(*gate.Config)) *rig {
	r := &rig{a: linktest.New()}
	cfg := gate.Defaults()
	cfg.Owner, cfg.Log = "gw-1", slog.New(slog.DiscardHandler)
	cfg.Authority.Target, cfg.Authority.Dial, cfg.Authority.Keepalive = "authority", r.a.Dial, 0
	cfg.Deadline, cfg.MaxForwardDelay = 2*time.Second, 5*time.Second
	base := time.Now()
	cfg.Clock.Now = func() agent.Reading {
		now := time.Now()
		return agent.Reading{Mono: grant.Instant(now.Sub(base) + time.Hour), Wall: grant.Instant(now.UnixNano() + r.step.Load())}
	}
	if change != nil {
		change(&cfg)
	}
	var err error
	if r.g, err = gate.New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.g.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done; r.a.Close() })
	ring, err := parseKeys("f", []byte(line("k1", "acme")+line("k2", "acme")+line("k9", "ghost")))
	if err != nil {
		t.Fatal(err)
	}
	keys := &Keys{}
	keys.cur.Store(&ring)
	rs, err := NewRoutes([]Route{
		{Pattern: "GET /v1/{id}", Class: "read"},
		{Pattern: "POST /v1/{id}", Class: "read"},
		{Pattern: "GET /huge", Class: "huge", CountHeader: "X-Count"},
		{Pattern: "GET /other", Class: "unpriced"},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.d = New(r.g, &Identity{keys: keys, trusted: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}, rs)
	return r
}

func (r *rig) await(t testing.TB) {
	for until := time.Now().Add(5 * time.Second); r.g.Ready() != nil; {
		if time.Now().After(until) {
			t.Fatal(r.g.Ready())
		}
		<-time.After(time.Millisecond)
	}
}

// fixed is a policy that admits burst requests and no more for an hour.
func fixed(burst grant.Units) *grant.Policy {
	return &grant.Policy{
		Plan: "gold", Rate: grant.Rate{Units: 1, Per: time.Hour}, Burst: burst,
		Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}, "huge": {Cost: burst}},
		Grant:   grant.GrantSettings{Quantum: 10, Owners: 2, TTL: 10 * time.Second},
	}
}

func get(h http.Handler, key, path string, head ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest("GET", path, nil)
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	for i := 0; i < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w
}

func body(t *testing.T, w *httptest.ResponseRecorder) Problem {
	t.Helper()
	var p Problem
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || w.Header().Get("Content-Type") != "application/problem+json" ||
		p.Status != w.Code || p.Type == "" || p.Title == "" || p.Reason == "" || w.Header().Get("Cache-Control") != "no-store" {
		t.Errorf("not a whole problem: %v %d %v %s", err, w.Code, w.Header(), w.Body)
	}
	return p
}

// The three doors admit the same number of one trace, refuse the rest with 429,
// and each admitted request reaches what is behind the door once.
func TestDoorsAgree(t *testing.T) {
	var behind atomic.Int64
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { behind.Add(1) }))
	defer backend.Close()
	const burst = 100
	for name, door := range map[string]func(*rig) http.Handler{
		"middleware": func(r *rig) http.Handler {
			return r.d.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { behind.Add(1) }))
		},
		"forward-auth": func(r *rig) http.Handler {
			h, err := r.d.ForwardAuth(XForwarded, "/auth")
			if err != nil {
				t.Fatal(err)
			}
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				ask := httptest.NewRequest("GET", "/auth", nil)
				ask.Header = req.Header.Clone()
				ask.Header.Set("X-Forwarded-Uri", req.URL.RequestURI())
				ask.Header.Set("X-Forwarded-Method", req.Method)
				rec := httptest.NewRecorder()
				h.ServeHTTP(rec, ask)
				if rec.Code == 200 {
					behind.Add(1)
				}
				for k, v := range rec.Header() {
					w.Header()[k] = v
				}
				w.WriteHeader(rec.Code)
				w.Write(rec.Body.Bytes())
			})
		},
		"proxy": func(r *rig) http.Handler {
			cfg := DefaultProxy()
			cfg.Backend = backend.URL
			p, err := r.d.Proxy(cfg, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(p.Close)
			return p
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			r.a.Put("acme", fixed(burst))
			r.await(t)
			h := door(r)
			behind.Store(0)
			var wg sync.WaitGroup
			codes := make([]atomic.Int64, 600)
			for worker := range 4 {
				wg.Go(func() {
					for i := range 60 {
						w := get(h, []string{"k1", "k2"}[i%2], fmt.Sprintf("/v1/%d-%d", worker, i))
						codes[w.Code].Add(1)
						if w.Code == 429 {
							if p := body(t, w); p.Reason != "rate" || p.Policy != "gold" || !strings.Contains(p.Limit, "burst 100") || w.Header().Get("Retry-After") == "" {
								t.Errorf("refused with %+v %v", p, w.Header())
							}
						}
					}
				})
			}
			wg.Wait()
			if codes[200].Load() != burst || codes[429].Load() != 240-burst || behind.Load() != burst {
				t.Errorf("of 240: %d passed, %d refused, %d reached the backend; want %d", codes[200].Load(), codes[429].Load(), behind.Load(), burst)
			}
			if r.d.Stats().Forwarded != burst {
				t.Errorf("stats: %+v", r.d.Stats())
			}
		})
	}
}

// Each kind of refusal has its own status, and Retry-After only where waiting
// helps (cases 9, 28, 32).
func TestRefusals(t *testing.T) {
	r := newRig(t, func(c *gate.Config) { c.Deadline = 30 * time.Millisecond })
	r.a.Put("acme", fixed(5))
	r.await(t)
	h := r.d.Middleware(http.NotFoundHandler())
	expect := func(what string, w *httptest.ResponseRecorder, code int, reason string, retry bool) {
		t.Helper()
		p := body(t, w)
		if w.Code != code || p.Reason != reason || (w.Header().Get("Retry-After") != "") != retry {
			t.Errorf("%s: %d %q Retry-After %q", what, w.Code, p.Reason, w.Header().Get("Retry-After"))
		}
	}
	expect("no credential", get(h, "", "/v1/a"), 401, "unverified", false)
	expect("wrong key", get(h, "nope", "/v1/a"), 401, "unverified", false)
	expect("unknown route", get(h, "k1", "/nowhere"), 404, "unknown-route", false)
	expect("class without a price", get(h, "k1", "/other"), 404, "unknown-route", false)
	expect("tenant without a policy", get(h, "k9", "/v1/a"), 403, "unknown-tenant", false)
	expect("a count that is none", get(h, "k1", "/huge", "X-Count", "2x"), 400, "invalid", false)
	auth, err := r.d.ForwardAuth(XOriginal, "")
	if err != nil {
		t.Fatal(err)
	}
	expect("a gateway that names no method", get(auth, "k1", "/v1/a", "X-Original-Uri", "/v1/a", "X-Forwarded-Method", "GET"), 400, "invalid", false)
	expect("too dear for ever", get(h, "k1", "/huge", "X-Count", "2"), 429, "cost-exceeds-burst", false)
	for _, c := range []struct {
		mood   linktest.Mood
		hangUp bool
		reason string
	}{{linktest.Overloaded, false, "overloaded"}, {linktest.Silent, false, "deadline"}, {linktest.Silent, true, "unavailable"}} {
		r := newRig(t, func(c *gate.Config) { c.Deadline = 30 * time.Millisecond })
		r.a.Put("acme", fixed(5))
		r.await(t)
		r.a.SetMood(c.mood)
		if c.hangUp {
			r.a.HangUp()
			for r.g.Ready() == nil {
				<-time.After(time.Millisecond)
			}
		}
		expect(c.reason, get(r.d.Middleware(http.NotFoundHandler()), "k1", "/v1/a"), 503, c.reason, true)
	}
}

// Retry-After is in whole seconds, rounded up, at least one (case 31).
func TestRetryAfter(t *testing.T) {
	for d, want := range map[time.Duration]int64{1: 1, time.Second: 1, time.Second + 1: 2, 90 * time.Minute: 5400} {
		if got := seconds(d); got != want {
			t.Errorf("%v: %d, want %d", d, got, want)
		}
	}
	if p := refusal(agent.Decision{Outcome: agent.Denied, Reason: grant.Over}); p.retryAfter != 0 {
		t.Error("a denial without an estimate has a Retry-After")
	}
	if p := refusal(agent.Decision{Outcome: agent.Denied, Reason: grant.CostExceedsBurst, RetryAfter: time.Second}); p.retryAfter != 0 {
		t.Error("what can never succeed has a Retry-After")
	}
	if p := refusal(agent.Decision{}); p.Status != 503 {
		t.Errorf("a decision that is none: %d", p.Status)
	}
}

// Case 28: 100,000 made-up keys leave no state, and most of them get the
// cheapest of answers.
func TestCase28MadeUpKeys(t *testing.T) {
	r := newRig(t, nil)
	r.await(t)
	h := r.d.Middleware(http.NotFoundHandler())
	for i := range 100_000 {
		req := &http.Request{Method: "GET", URL: httptest.NewRequest("GET", "/v1/a", nil).URL, Header: http.Header{"X-Api-Key": {fmt.Sprint("made-up-", i)}}, RemoteAddr: "1.2.3.4:5"}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		if w.Code != 401 {
			t.Fatal(w.Code)
		}
	}
	s := r.d.Stats()
	if g := r.g.Stats(); g.Tenants != 0 || g.Wallets.Checks != 0 || len(g.Decisions) != 0 {
		t.Errorf("state after made-up keys: %+v", g)
	}
	if s.Unverified != 100_000 || s.Flooded < 50_000 {
		t.Errorf("%+v", s)
	}
}

// A shadow verdict lets the request pass and shows.
func TestShadow(t *testing.T) {
	r := newRig(t, nil)
	p := fixed(1)
	p.Mode, p.Grant = grant.Shadow, grant.GrantSettings{}
	r.a.Put("acme", p)
	r.await(t)
	h := r.d.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	if w := get(h, "k1", "/v1/a"); w.Code != 200 || w.Header().Get(ShadowHeader) != "" {
		t.Errorf("within the limit: %d %q", w.Code, w.Header().Get(ShadowHeader))
	}
	if w := get(h, "k1", "/v1/a"); w.Code != 200 || w.Header().Get(ShadowHeader) != "rate" {
		t.Errorf("over the limit: %d %q", w.Code, w.Header().Get(ShadowHeader))
	}
}

// proxyTo is a proxy in front of addr.
func proxyTo(t *testing.T, r *rig, url string, change func(*ProxyConfig)) *Proxy {
	t.Helper()
	cfg := DefaultProxy()
	cfg.Backend = url
	if change != nil {
		change(&cfg)
	}
	p, err := r.d.Proxy(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// A backend that reads a request on a kept connection and hangs up gets it once:
// net/http alone would send a GET a second time.
func TestForwardsOnce(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var seen atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for n := 0; ; n++ {
					req, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					io.Copy(io.Discard, req.Body)
					seen.Add(1)
					if n > 0 {
						return // the second request of a connection is read and not answered
					}
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				}
			})
		}
	})
	r := newRig(t, nil)
	r.a.Put("acme", fixed(100))
	r.await(t)
	p := proxyTo(t, r, "http://"+lis.Addr().String(), nil)
	first, second := get(p, "k1", "/v1/a"), get(p, "k1", "/v1/b", "Idempotency-Key", "1")
	if first.Code != 200 || second.Code != 502 || seen.Load() != 2 {
		t.Errorf("%d and %d; the backend saw %d requests, want 2", first.Code, second.Code, seen.Load())
	}
	p.Close()
	lis.Close()
	wg.Wait()
}

// stepping moves the clock between the decision and the first byte.
type stepping struct {
	next http.RoundTripper
	step func()
}

func (s stepping) RoundTrip(r *http.Request) (*http.Response, error) {
	s.step()
	return s.next.RoundTrip(r)
}

// What is admitted but held up, or admitted before a clock moved, does not
// reach the backend: not even its first byte.
func TestRechecksAtFirstByte(t *testing.T) {
	var seen atomic.Int64
	backend := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { seen.Add(1) }))
	defer backend.Close()
	r := newRig(t, nil)
	r.a.Put("acme", fixed(100))
	r.await(t)
	p := proxyTo(t, r, backend.URL, nil)
	var by atomic.Int64
	p.rp.Transport = stepping{p.rp.Transport, func() { r.step.Add(by.Load()) }}
	if w := get(p, "k1", "/v1/a"); w.Code != 200 {
		t.Fatal(w.Code)
	}
	by.Store(int64(time.Minute))
	w := get(p, "k1", "/v1/a")
	if pb := body(t, w); w.Code != 503 || pb.Reason != "deadline" || w.Header().Get("Retry-After") != "1" || seen.Load() != 1 {
		t.Errorf("after a step: %d %q, the backend saw %d", w.Code, pb.Reason, seen.Load())
	}
	// The connection itself refuses, once and for all.
	a := &attempt{gate: r.g, decision: agent.Decision{Outcome: agent.Admitted}}
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	c := &backendConn{Conn: here}
	c.next.Store(a)
	if _, err := c.Write([]byte("GET")); !errors.Is(err, errLate) {
		t.Errorf("a stale attempt writes: %v", err)
	}
	c.next.Store(a)
	if _, err := c.Write([]byte("GET")); !errors.Is(err, errOnce) {
		t.Errorf("a second attempt writes: %v", err)
	}
}

// The backend sees at most InFlight requests at once; those beyond the queue
// are refused at once and charged nothing.
func TestPlaces(t *testing.T) {
	var now, most atomic.Int64
	release, entered := make(chan struct{}), make(chan struct{}, 10)
	backend := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		most.Store(max(most.Load(), now.Add(1)))
		entered <- struct{}{}
		<-release
		now.Add(-1)
	}))
	defer backend.Close()
	r := newRig(t, nil)
	r.a.Put("acme", fixed(100))
	r.await(t)
	p := proxyTo(t, r, backend.URL, func(c *ProxyConfig) { c.InFlight, c.Queue, c.QueueWait = 1, 1, time.Minute })
	codes := make(chan int, 3)
	go func() { codes <- get(p, "k1", "/v1/a").Code }()
	<-entered
	go func() { codes <- get(p, "k1", "/v1/b").Code }()
	for waiting, _ := p.Queued(); waiting == 0; waiting, _ = p.Queued() {
		<-time.After(time.Millisecond)
	}
	if w := get(p, "k1", "/v1/c"); w.Code != 503 || body(t, w).Reason != "backend-overloaded" {
		t.Errorf("beyond the queue: %d", w.Code)
	}
	close(release)
	if a, b := <-codes, <-codes; a != 200 || b != 200 || most.Load() != 1 {
		t.Errorf("%d, %d, %d at once", a, b, most.Load())
	}
	s := r.g.Stats()
	_, checked := r.a.Deducted("acme")
	if paid := s.Wallets.Spent + checked; paid != 2 {
		t.Errorf("two forwarded, %d charged", paid)
	}
}

// A backend that is down costs 502, not 500 or 503, and the request stays
// charged; every fault of a configuration is named.
func TestBackendDown(t *testing.T) {
	r := newRig(t, nil)
	r.a.Put("acme", fixed(100))
	r.await(t)
	p := proxyTo(t, r, "http://127.0.0.1:1", nil)
	if w := get(p, "k1", "/v1/a"); w.Code != 502 || body(t, w).Reason != "backend" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if s := r.d.Stats(); s.BackendFailed != 1 || s.Forwarded != 0 {
		t.Errorf("%+v", s)
	}
	err := ProxyConfig{Listen: ":1", Backend: "ftp://x", Queue: -1, QueueWait: -1}.Validate()
	for _, field := range []string{"backend", "in_flight", "queue", "queue_wait"} {
		if err == nil || !strings.Contains(err.Error(), field+":") {
			t.Errorf("%s is not named in %v", field, err)
		}
	}
}
