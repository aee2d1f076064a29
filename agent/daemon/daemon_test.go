package daemon

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/goleak"

	"github.com/stipend/stipend/agent/doors"
	"github.com/stipend/stipend/agent/link/linktest"
	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a running agent with a fake authority and a backend.
type world struct {
	a       *linktest.Authority
	addrs   Addresses
	folder  string
	backend atomic.Int64
	client  *http.Client
	log     logged
	stop    func() error
}

// logged is what an agent logs.
type logged struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func config(t *testing.T, a *linktest.Authority, backend string) Config {
	cfg := DefaultConfig()
	cfg.Owner, cfg.Version, cfg.Logger = "gw/1", "test", slog.New(slog.DiscardHandler)
	cfg.Authority.Target, cfg.Authority.Dial, cfg.Authority.Keepalive = "authority", a.Dial, 0
	cfg.Gate.Deadline, cfg.Gate.MaxForwardDelay = time.Second, 5*time.Second
	keys := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(keys, fmt.Appendf(nil, "sha256:%x acme\n", sha256.Sum256([]byte("k1"))), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg.Identity = doors.IdentityConfig{KeyFile: keys}
	cfg.Routes = []doors.Route{{Pattern: "GET /v1/{id}", Class: "read"}}
	cfg.Proxy.Listen, cfg.Proxy.Backend = "127.0.0.1:0", backend
	cfg.Auth.Listen, cfg.Auth.Source, cfg.Admin = "127.0.0.1:0", doors.FromRequest, "127.0.0.1:0"
	cfg.Record.Folder = t.TempDir()
	cfg.DrainTime = 5 * time.Second
	return cfg
}

func start(t *testing.T, change func(*Config)) *world {
	w := &world{a: linktest.New(), client: &http.Client{Transport: &http.Transport{}}}
	backend := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { w.backend.Add(1) }))
	cfg := config(t, w.a, backend.URL)
	cfg.Logger = slog.New(slog.NewTextHandler(&w.log, nil))
	if change != nil {
		change(&cfg)
	}
	for _, err := range []error{cfg.Validate(), cfg.Authority.Validate(), cfg.Gate.Validate(), cfg.Identity.Validate(),
		cfg.Proxy.Validate(), cfg.Auth.Validate(), cfg.Record.Validate()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	w.folder = cfg.Record.Folder
	w.a.Put("acme", &grant.Policy{
		Rate: grant.Rate{Units: 1, Per: time.Hour}, Burst: 200, Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}},
		Grant: grant.GrantSettings{Quantum: 20, Owners: 2, TTL: 10 * time.Second},
	})
	ready := make(chan Addresses, 1)
	cfg.Ready = func(a Addresses) { ready <- a }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg) }()
	select {
	case w.addrs = <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	w.stop = func() error {
		cancel()
		err := <-done
		w.client.CloseIdleConnections()
		backend.Close()
		w.a.Close()
		return err
	}
	for until := time.Now().Add(5 * time.Second); w.get(t, w.addrs.Admin, "/readyz", "") != 200; {
		if time.Now().After(until) {
			t.Fatal("not ready")
		}
		<-time.After(5 * time.Millisecond)
	}
	return w
}

func (w *world) body(t *testing.T, addr fmt.Stringer, path, key string) (int, string) {
	t.Helper()
	req, err := http.NewRequest("GET", "http://"+addr.String()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("X-API-Key", key)
	}
	resp, err := w.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func (w *world) get(t *testing.T, addr fmt.Stringer, path, key string) int {
	t.Helper()
	code, _ := w.body(t, addr, path, key)
	return code
}

// The whole agent: proxy and forward-auth spend one budget, metrics and record
// count the same admissions, and a stop drains, discards and ends the file.
func TestRun(t *testing.T) {
	w := start(t, nil)
	codes := map[int]int{}
	for i := range 300 {
		if i%2 == 0 {
			codes[w.get(t, w.addrs.Proxy, "/v1/a", "k1")]++
		} else {
			codes[w.get(t, w.addrs.Auth, "/auth/v1/a", "k1")]++
		}
	}
	if codes[200] != 200 || codes[429] != 100 || w.backend.Load() == 0 {
		t.Errorf("of 300 at a burst of 200: %v, %d at the backend", codes, w.backend.Load())
	}
	if got := w.get(t, w.addrs.Proxy, "/v1/a", "wrong"); got != 401 {
		t.Errorf("a wrong key: %d", got)
	}
	_, metrics := w.body(t, w.addrs.Admin, "/metrics", "")
	for _, want := range []string{
		`stipend_agent_door_total{event="unverified"} 1`, `stipend_agent_door_total{event="forwarded"} 200`,
		"stipend_agent_keys 1", "stipend_agent_keys_stale 0", "stipend_agent_link_up 1", "stipend_agent_records_lost_total 0",
		`stipend_agent_held_units{account="ordinary"} 0`, `stipend_agent_build_info{version="test"} 1`,
		`stipend_agent_decisions_total{outcome="undecided",path="local",reason="deadline"} 0`,
	} {
		if !strings.Contains(metrics, want+"\n") {
			t.Errorf("metrics lack %s", want)
		}
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	files, err := filepath.Glob(filepath.Join(w.folder, "gw%2F1-*.admissions"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	r, err := trace.OpenFile(trace.Admissions, files[0], trace.Options{Window: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var units grant.Units
	for rec, err := range r.Records() {
		if err != nil {
			t.Fatal(err)
		}
		units += rec.Cost
	}
	if s := r.Stats(); units != 200 || !s.Complete || s.Lost != 0 {
		t.Errorf("%d units recorded of 200: %+v", units, s)
	}
}

// /drain takes the agent out of readiness and discards; it goes on answering,
// with 503. The log tells the beginning and the end of the drain once each, and
// the end of the process.
func TestDrain(t *testing.T) {
	w := start(t, func(c *Config) { c.Auth = Auth{} })
	if got := w.get(t, w.addrs.Proxy, "/v1/a", "k1"); got != 200 {
		t.Fatal(got)
	}
	for range 2 {
		if got := w.get(t, w.addrs.Admin, "/drain", ""); got != 200 {
			t.Errorf("drain: %d", got)
		}
	}
	ready, why := w.body(t, w.addrs.Admin, "/readyz", "")
	if live := w.get(t, w.addrs.Admin, "/healthz", ""); ready != 503 || why != "drained\n" || live != 200 {
		t.Errorf("ready %d %q, alive %d", ready, why, live)
	}
	if got := w.get(t, w.addrs.Proxy, "/v1/a", "k1"); got != 503 {
		t.Errorf("after the drain: %d", got)
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	log := w.log.String()
	for _, line := range []string{`level=INFO msg="drain begins`, `level=INFO msg="drained`, "level=INFO msg=stopped"} {
		if n := strings.Count(log, line); n != 1 {
			t.Errorf("%d times %q in\n%s", n, line, log)
		}
	}
	if strings.Contains(log, "nil") || strings.Contains(log, "auth=") || strings.Contains(log, "canceled") || !strings.HasSuffix(log, "msg=stopped owner=gw/1\n") {
		t.Errorf("log:\n%s", log)
	}
}

// A stop without the authority says what becomes of the units.
func TestDrainAlone(t *testing.T) {
	w := start(t, func(c *Config) { c.DrainTime = 0 })
	w.a.SetMood(linktest.Silent)
	w.a.HangUp()
	for w.get(t, w.addrs.Admin, "/readyz", "") == 200 {
		<-time.After(time.Millisecond)
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	log := w.log.String()
	for _, line := range []string{`because=signal`, `level=WARN msg="drained, but the authority was not told`, "level=INFO msg=stopped"} {
		if n := strings.Count(log, line); n != 1 {
			t.Errorf("%d times %q in\n%s", n, line, log)
		}
	}
}

// The metrics keep the conventions and describe themselves truthfully.
func TestMetricsLint(t *testing.T) {
	a := linktest.New()
	defer a.Close()
	cfg := config(t, a, "http://127.0.0.1:1")
	d := &agentd{cfg: cfg, log: cfg.Logger}
	if _, err := d.build(); err != nil {
		t.Fatal(err)
	}
	defer d.close()
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(newCollector(d)); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", err, problems)
	}
}

// Faults of a configuration are named, and a port that is taken ends Run.
func TestFaults(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Owner, cfg.DrainTime, cfg.GCPercent, cfg.MemoryLimit = "", -1, 1, 5
	err := cfg.Validate()
	for _, field := range []string{"owner", "routes", "proxy.listen", "drain_time", "gc_percent", "memory_limit"} {
		if err == nil || !strings.Contains(err.Error(), field+":") {
			t.Errorf("%s is not named in %v", field, err)
		}
	}
	cfg.Routes = []doors.Route{{Pattern: "/a", Class: "a", CountHeader: "X-Tokens"}}
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "identity.trusted_peers: none") {
		t.Errorf("a count that nobody may send: %v", err)
	}
	const source = "source: not given; allowed: x-forwarded (Caddy, Traefik), x-original (nginx), request (Envoy)"
	auth := cfg.Auth
	if err := auth.Validate(); err != nil {
		t.Errorf("no endpoint and no source: %v", err)
	}
	if auth.Listen = ":1"; auth.Validate() == nil || auth.Validate().Error() != source {
		t.Errorf("an endpoint without a source: %v", auth.Validate())
	}
	a := linktest.New()
	defer a.Close()
	taken := httptest.NewServer(http.NotFoundHandler())
	defer taken.Close()
	cfg = config(t, a, taken.URL)
	cfg.Admin = strings.TrimPrefix(taken.URL, "http://")
	if err := Run(context.Background(), cfg); err == nil || !strings.Contains(err.Error(), "admin:") {
		t.Errorf("a taken port: %v", err)
	}
}
