package link_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stipend/stipend/agent/link"
	"github.com/stipend/stipend/agent/link/linktest"
	"github.com/stipend/stipend/proto/grant"
	"github.com/stipend/stipend/proto/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// log collects what a link reports.
type log struct {
	mu     sync.Mutex
	ups    []time.Time
	downs  []error
	fails  []error
	grants []grant.GrantAnswer
	checks []grant.CheckAnswer
	pushes []wire.TenantPolicy
	fates  []grant.Reason
	onUp   func()
}

func (g *log) events(t *testing.T) link.Events {
	return link.Events{
		Up: func(link.Peer) {
			g.mu.Lock()
			g.ups = append(g.ups, time.Now())
			onUp := g.onUp
			g.mu.Unlock()
			if onUp != nil {
				onUp()
			}
		},
		Down:    func(err error) { g.mu.Lock(); g.downs = append(g.downs, err); g.mu.Unlock() },
		Failed:  func(err error) { g.mu.Lock(); g.fails = append(g.fails, err); g.mu.Unlock() },
		Grant:   func(a grant.GrantAnswer) { g.mu.Lock(); g.grants = append(g.grants, a); g.mu.Unlock() },
		Check:   func(a grant.CheckAnswer) { g.mu.Lock(); g.checks = append(g.checks, a); g.mu.Unlock() },
		Policy:  func(p wire.TenantPolicy) { g.mu.Lock(); g.pushes = append(g.pushes, p); g.mu.Unlock() },
		Fate:    func(r grant.Reason) { g.mu.Lock(); g.fates = append(g.fates, r); g.mu.Unlock() },
		Problem: func(err error) { t.Error(err) },
	}
}

func policy() *grant.Policy {
	return &grant.Policy{
		Rate: grant.Rate{Units: 1000, Per: time.Second}, Burst: 1000,
		Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}},
		Grant:   grant.GrantSettings{Quantum: 100, Owners: 4, TTL: 10 * time.Second},
	}
}

var inc = grant.Incarnation{1, 2, 3}

func check(seq uint64) *grant.CheckRequest {
	r := &grant.CheckRequest{Tenant: "t", Class: "read", Count: 1, Budget: time.Second,
		Attempt: grant.Attempt{Incarnation: inc, Seq: seq}}
	r.Sum = r.Fingerprint()
	return r
}

func ask(id grant.GrantID) *grant.GrantRequest {
	r := &grant.GrantRequest{Tenant: "t", Incarnation: inc, ID: id, Want: 10, Min: 1}
	r.Sum = r.Fingerprint()
	return r
}

// world runs body in a bubble with a running link.
func world(t *testing.T, change func(*link.Config), body func(*testing.T, *linktest.Authority, *link.Link, *log)) {
	synctest.Test(t, func(t *testing.T) {
		a := linktest.New()
		a.Put("t", policy())
		cfg := link.Defaults()
		cfg.Target, cfg.Dial, cfg.Keepalive = "authority", a.Dial, 0
		if change != nil {
			change(&cfg)
		}
		g := &log{}
		l, err := link.New(cfg, link.Identity{Owner: "gw-1", Incarnation: inc}, g.events(t))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		synctest.Wait()
		body(t, a, l, g)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		a.Close()
	})
}

// Everything that was queued while no batch could leave goes out as one batch,
// and every entry is answered.
func TestCoalesces(t *testing.T) {
	world(t, nil, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		for i := range 20 {
			if why := l.Check(check(uint64(i + 1))); why != grant.None {
				t.Fatal(why)
			}
		}
		if why := l.Grant(ask(1)); why != grant.None {
			t.Fatal(why)
		}
		synctest.Wait()
		if len(g.checks) != 20 || len(g.grants) != 1 {
			t.Fatalf("%d checks and %d grants answered, want 20 and 1", len(g.checks), len(g.grants))
		}
		if n := len(a.Batches()); n > 3 {
			t.Errorf("21 entries took %d batches", n)
		}
		if g.grants[0].Result != grant.Granted || g.grants[0].Units != 10 || g.grants[0].Policy.Policy == nil {
			t.Errorf("granted: %+v", g.grants[0])
		}
	})
}

// Without a stream, and with a full queue, the caller learns at once.
func TestRefusesAtOnce(t *testing.T) {
	world(t, func(c *link.Config) { c.Queue = 4 }, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		a.SetMood(linktest.Silent)
		l.Check(check(1)) // leaves at once; the rest waits for its answer
		synctest.Wait()
		var whys []string
		for i := range 6 {
			whys = append(whys, l.Check(check(uint64(i+2))).String())
		}
		if got := strings.Join(whys, ","); got != ",,,,overloaded,overloaded" {
			t.Errorf("a queue of 4 answered %q", got)
		}
		a.HangUp()
		synctest.Wait()
		if why := l.Check(check(9)); why != grant.Unavailable {
			t.Errorf("without a stream: %v", why)
		}
		if s := l.State(); s.Up || s.Queued != 0 {
			t.Errorf("after the stream broke: %+v", s)
		}
	})
}

// After a reconnect one batch is in flight until the first answer, and the
// entries in flight grow with the answers, not at once.
func TestSlowStart(t *testing.T) {
	world(t, nil, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		a.SetMood(linktest.Silent)
		a.HangUp()
		synctest.Wait()
		a.SetMood(linktest.Well)
		before := len(a.Batches())
		g.mu.Lock()
		g.onUp = func() {
			for i := range 2000 {
				l.Check(check(uint64(i + 1)))
			}
		}
		g.mu.Unlock()
		advance(time.Second)
		synctest.Wait()
		if len(g.checks) != 2000 {
			t.Fatalf("%d of 2000 answered", len(g.checks))
		}
		sent := a.Batches()[before:]
		if sent[0] > 32 {
			t.Errorf("the first batch after the reconnect has %d entries, more than the first window of 32", sent[0])
		}
		for i := 1; i < len(sent); i++ {
			sum := 0
			for _, n := range sent[:i] {
				sum += n
			}
			if sent[i] > 32+sum {
				t.Errorf("batch %d has %d entries after %d answered", i, sent[i], sum)
			}
		}
	})
}

// Case 26: an authority that accepts and never answers. The stream counts as
// lost after the silence, dials go on without a herd, and after the return the
// link is up within a second.
func TestSilentAuthority(t *testing.T) {
	world(t, nil, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		a.SetMood(linktest.Silent)
		l.Check(check(1))
		advance(2600 * time.Millisecond)
		synctest.Wait()
		if len(g.downs) != 1 || !strings.Contains(fmt.Sprint(g.downs), "nothing heard") {
			t.Fatalf("after 2.6 s of silence: %v", g.downs)
		}
		advance(time.Minute)
		if n := a.Opened(); n > 1+60 {
			t.Errorf("%d dials in a minute of silence", n)
		}
		a.SetMood(linktest.Well)
		back := time.Now()
		advance(2 * time.Second)
		synctest.Wait()
		if len(g.ups) != 2 {
			t.Fatalf("%d welcomes, want 2", len(g.ups))
		}
		if d := g.ups[1].Sub(back); d > time.Second {
			t.Errorf("up again %v after the return", d)
		}
	})
}

// A stream that is idle is not lost: nothing is awaited.
func TestIdleIsNotSilence(t *testing.T) {
	world(t, nil, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		l.Check(check(1))
		advance(time.Hour)
		synctest.Wait()
		if len(g.downs) != 0 || !l.State().Up {
			t.Errorf("an idle hour: %v", g.downs)
		}
	})
}

// Redial pauses are spread: of many agents that lost the same authority no
// large part comes back in the same 10 ms.
func TestNoHerd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := linktest.New()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		logs := make([]*log, 60)
		for i := range logs {
			g := &log{}
			logs[i] = g
			cfg := link.Defaults()
			cfg.Target, cfg.Dial, cfg.Keepalive = "authority", a.Dial, 0
			l, err := link.New(cfg, link.Identity{Owner: grant.Owner(fmt.Sprintf("gw-%d", i)), Incarnation: grant.NewIncarnation()}, g.events(t))
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() { l.Run(ctx) })
		}
		synctest.Wait()
		a.HangUp()
		lost := time.Now()
		advance(time.Second)
		synctest.Wait()
		buckets := map[time.Duration]int{}
		for i, g := range logs {
			if len(g.ups) < 2 {
				t.Fatalf("agent %d is not back", i)
			}
			buckets[g.ups[1].Sub(lost)/(10*time.Millisecond)]++
		}
		for at, n := range buckets {
			if n > len(logs)/2 {
				t.Errorf("%d of %d agents came back within the 10 ms after %v", n, len(logs), at*10*time.Millisecond)
			}
		}
		cancel()
		wg.Wait()
		a.Close()
	})
}

// Policies are pushed, the fate is told, a drain makes the link come again, and
// an authority that does not know the session gets a new Open.
func TestFrames(t *testing.T) {
	world(t, nil, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		p := policy()
		p.Burst = 7
		a.Put("t", p)
		synctest.Wait()
		if len(g.pushes) != 1 || g.pushes[0].Policy.Burst != 7 || g.pushes[0].Version != 2 {
			t.Errorf("pushed: %+v", g.pushes)
		}
		a.Drain()
		advance(time.Second)
		synctest.Wait()
		if len(g.ups) != 2 || !l.State().Up {
			t.Errorf("after drain: %d welcomes", len(g.ups))
		}
		a.SetMood(linktest.Forgetful)
		l.Check(check(1))
		synctest.Wait()
		a.SetMood(linktest.Well)
		advance(time.Second)
		synctest.Wait()
		if len(g.ups) != 3 || a.Opened() != 3 {
			t.Errorf("after an unknown session: %d welcomes", len(g.ups))
		}
		a.Fate(grant.Superseded)
		synctest.Wait()
		if len(g.fates) != 1 || l.State().Fate != grant.Superseded {
			t.Errorf("fate: %v", g.fates)
		}
	})
}

// Discard is confirmed, after which Run ends; against a silent authority it
// ends with its context; without a stream it fails at once.
func TestDiscard(t *testing.T) {
	world(t, nil, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		a.SetMood(linktest.Silent)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		start := time.Now()
		if err := l.Discard(ctx); err == nil || time.Since(start) != 300*time.Millisecond {
			t.Errorf("silent: %v after %v", err, time.Since(start))
		}
		a.HangUp()
		synctest.Wait()
		if err := l.Discard(t.Context()); err == nil {
			t.Error("discarded without a stream")
		}
		a.SetMood(linktest.Well)
		advance(time.Second)
		synctest.Wait()
		if err := l.Discard(t.Context()); err != nil {
			t.Error(err)
		}
		if !a.Discarded(inc) {
			t.Error("the authority does not know of the discard")
		}
	})
}

// Every fault of a configuration is named.
func TestConfigValidate(t *testing.T) {
	if err := link.Defaults().Validate(); err != nil {
		t.Error(err)
	}
	err := link.Config{TLS: link.TLS{Cert: "x"}, Keepalive: time.Second}.Validate()
	for _, field := range []string{"target", "silence", "handshake", "redial_min", "keepalive", "queue", "tls.cert", "tls.enabled"} {
		if err == nil || !strings.Contains(err.Error(), field+":") {
			t.Errorf("%s is not named in %v", field, err)
		}
	}
}

// The authority's address is a host and a port; the error shows one.
func TestTarget(t *testing.T) {
	for target, ok := range map[string]bool{
		"authority:7400": true, "127.0.0.1:7400": true, "[::1]:7400": true,
		"authority": false, "": false, ":7400": false, "authority:": false, "authority:http": false, "authority:0": false,
		"authority:65536": false, "::1": false, "http://authority:7400": false,
	} {
		cfg := link.Defaults()
		cfg.Target = target
		err := cfg.Validate()
		if (err == nil) != ok {
			t.Errorf("%q: %v", target, err)
		}
		if want := fmt.Sprintf("target: %q; allowed: host:port of the authority, such as authority:7400 or 127.0.0.1:7400", target); !ok && fmt.Sprint(err) != want {
			t.Errorf("%q: %v", target, err)
		}
	}
}

// Every attempt that opens no stream is told with its reason, but not the one
// that ends because the link does.
func TestFailedDials(t *testing.T) {
	var refuse atomic.Bool
	world(t, func(c *link.Config) {
		dial := c.Dial
		c.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			if refuse.Load() {
				return nil, errors.New("nobody listens")
			}
			return dial(ctx, addr)
		}
	}, func(t *testing.T, a *linktest.Authority, l *link.Link, g *log) {
		refuse.Store(true)
		a.HangUp()
		advance(5 * time.Second)
		if n := l.State().Dials; len(g.fails) == 0 || uint64(len(g.fails)) != n-1 {
			t.Errorf("of %d dials after the first one %d are told", n-1, len(g.fails))
		}
		for _, err := range g.fails {
			if !strings.Contains(err.Error(), "nobody listens") {
				t.Errorf("the reason is missing: %v", err)
			}
		}
		refuse.Store(false)
		a.SetMood(linktest.Silent) // what is open at the end waits for its welcome
		told := len(g.fails)
		advance(time.Second)
		if len(g.fails) != told {
			t.Errorf("told of an attempt that goes on: %v", g.fails[told:])
		}
		t.Cleanup(func() {
			if len(g.fails) != told {
				t.Errorf("told of the end: %v", g.fails[told:])
			}
		})
	})
}

// advance lets the bubble's clock run on by d.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}
