package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// running is a daemon under test, the real one: Run on port 0.
type running struct {
	t    *testing.T
	at   Addresses
	conn *grpc.ClientConn
	end  func() error // asks Run to drain and returns what it returned

	policies stipendv1.PolicyServiceClient
	checks   stipendv1.CheckServiceClient
	inspect  stipendv1.InspectServiceClient
}

func testConfig(dir string) Config {
	cfg := DefaultConfig()
	cfg.Listen, cfg.HTTP, cfg.Data = "127.0.0.1:0", "127.0.0.1:0", dir
	cfg.Etcd.LeaseTTL = 2 * time.Second
	cfg.Store.MinFreeBytes = 0
	cfg.Init = true // tests that start again clear it
	cfg.DrainTime = 10 * time.Second
	cfg.Logger = slog.New(slog.DiscardHandler)
	if os.Getenv("STIPEND_TEST_LOG") != "" {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return cfg
}

// begin starts Run and waits until it serves; a daemon that ends before is the
// returned error.
func begin(t *testing.T, cfg Config, creds ...grpc.DialOption) (*running, error) {
	t.Helper()
	ready := make(chan Addresses, 1)
	cfg.Ready = func(a Addresses) { ready <- a }
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, cfg) }()
	r := &running{t: t}
	select {
	case r.at = <-ready:
	case err := <-ended:
		cancel()
		return nil, err
	}
	var err error
	if len(creds) == 0 {
		creds = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	if r.conn, err = grpc.NewClient("passthrough:///"+r.at.GRPC.String(), creds...); err != nil {
		t.Fatal(err)
	}
	r.policies = stipendv1.NewPolicyServiceClient(r.conn)
	r.checks = stipendv1.NewCheckServiceClient(r.conn)
	r.inspect = stipendv1.NewInspectServiceClient(r.conn)
	r.end = sync.OnceValue(func() error {
		cancel()
		err := <-ended
		r.conn.Close()
		return err
	})
	t.Cleanup(func() {
		if err := r.end(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return r, nil
}

func must(t *testing.T, r *running, err error) *running {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

var (
	shared    struct{ r *running }
	sharedDir string
)

// sharedDaemon is one daemon for all tests that do not stop it; each uses
// tenants and owners of its own.
func sharedDaemon(t *testing.T) *running {
	t.Helper()
	r := *shared.r
	r.t = t
	return &r
}

func ctxOf(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// slowPolicy refills so slowly that a test sees levels stand still.
func slowPolicy() *grant.Policy {
	return &grant.Policy{
		Rate: grant.Rate{Units: 1, Per: time.Hour}, Burst: 100,
		Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}, "big": {Cost: 50}, "free": {}},
		Grant:   grant.GrantSettings{Quantum: 20, Owners: 4, TTL: 10 * time.Second},
	}
}

func (r *running) put(tenant string, p *grant.Policy) uint64 {
	r.t.Helper()
	res, err := r.policies.PutPolicy(ctxOf(r.t), &stipendv1.PutPolicyRequest{Tenant: tenant, Policy: wire.ToPolicy(p), AnyVersion: true})
	if err != nil {
		r.t.Fatal(err)
	}
	return res.Version
}

func (r *running) tenant(name string) *stipendv1.GetTenantResponse {
	r.t.Helper()
	res, err := r.inspect.GetTenant(ctxOf(r.t), &stipendv1.GetTenantRequest{Tenant: name})
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

// agent speaks the link by hand, so that tests see every frame.
type agent struct {
	t      *testing.T
	stream stipendv1.LinkService_LinkClient
	inc    grant.Incarnation
	hello  *stipendv1.Welcome

	grants   []*stipendv1.GrantResponse
	checks   []*stipendv1.CheckResponse
	policies []*stipendv1.TenantPolicy
	fate     stipendv1.Reason
	gone     bool // discarded
	drain    bool
}

// link opens a stream; a refusal is the error.
func (r *running) link(owner string, inc grant.Incarnation) (*agent, error) {
	r.t.Helper()
	s, err := stipendv1.NewLinkServiceClient(r.conn).Link(ctxOf(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	a := &agent{t: r.t, stream: s, inc: inc}
	a.send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Open{Open: &stipendv1.Open{Owner: owner, Incarnation: inc[:]}}})
	f, err := s.Recv()
	if err != nil {
		return nil, err
	}
	if a.hello = f.GetWelcome(); a.hello == nil {
		r.t.Fatalf("the first frame is %v", f)
	}
	return a, nil
}

func (r *running) mustLink(owner string, inc grant.Incarnation) *agent {
	r.t.Helper()
	a, err := r.link(owner, inc)
	if err != nil {
		r.t.Fatal(err)
	}
	return a
}

func (a *agent) send(f *stipendv1.LinkRequest) {
	a.t.Helper()
	if err := a.stream.Send(f); err != nil && !errors.Is(err, io.EOF) {
		a.t.Fatal(err)
	}
}

func (a *agent) batch(b *stipendv1.AgentBatch) {
	a.t.Helper()
	a.send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Batch{Batch: b}})
}

func (a *agent) discard() {
	a.t.Helper()
	a.send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Discard{Discard: &stipendv1.Discard{}}})
}

// next receives one frame; the error is how the stream ended.
func (a *agent) next() error {
	f, err := a.stream.Recv()
	if err != nil {
		return err
	}
	if b := f.GetBatch(); b != nil {
		a.grants = append(a.grants, b.Grants...)
		a.checks = append(a.checks, b.Checks...)
		a.policies = append(a.policies, b.Policies...)
		a.fate = max(a.fate, b.Fate)
	}
	a.gone = a.gone || f.GetDiscarded() != nil
	a.drain = a.drain || f.GetDrain() != nil
	return nil
}

// until receives frames until done.
func (a *agent) until(what string, done func() bool) {
	a.t.Helper()
	for !done() {
		if err := a.next(); err != nil {
			a.t.Fatalf("waiting for %s: %v", what, err)
		}
	}
}

// ended receives until the stream ends and returns its code and reason.
func (a *agent) ended() (codes.Code, string) {
	for {
		if err := a.next(); err != nil {
			if errors.Is(err, io.EOF) {
				return codes.OK, ""
			}
			return status.Code(err), reasonOf(err)
		}
	}
}

// leave closes the stream and waits for its end.
func (a *agent) leave() {
	a.t.Helper()
	if err := a.stream.CloseSend(); err != nil {
		a.t.Fatal(err)
	}
	if code, why := a.ended(); code != codes.OK {
		a.t.Errorf("the stream that the agent closed ended with %v %q", code, why)
	}
}

func (a *agent) request(tenant string, id grant.GrantID, want, held grant.Units) *grant.GrantRequest {
	r := &grant.GrantRequest{Tenant: grant.TenantID(tenant), Incarnation: a.inc, ID: id, Want: want, Min: 1, Held: held}
	r.Sum = r.Fingerprint()
	return r
}

// ask sends one grant request and waits for its answer.
func (a *agent) ask(r *grant.GrantRequest) *stipendv1.GrantResponse {
	a.t.Helper()
	n := len(a.grants)
	a.batch(&stipendv1.AgentBatch{Grants: []*stipendv1.GrantRequest{wire.ToGrantRequest(r)}})
	a.until("a grant answer", func() bool { return len(a.grants) > n })
	return a.grants[n]
}

func (a *agent) checkRequest(tenant, class string, seq uint64, budget time.Duration) *stipendv1.CheckRequest {
	r := &grant.CheckRequest{Tenant: grant.TenantID(tenant), Class: grant.RouteClass(class), Count: 1, Attempt: grant.Attempt{Incarnation: a.inc, Seq: seq}, Budget: budget}
	r.Sum = r.Fingerprint()
	return wire.ToCheckRequest(r)
}

func (a *agent) check(m ...*stipendv1.CheckRequest) []*stipendv1.CheckResponse {
	a.t.Helper()
	n := len(a.checks)
	a.batch(&stipendv1.AgentBatch{Checks: m})
	a.until("check answers", func() bool { return len(a.checks) >= n+len(m) })
	return a.checks[n:]
}

func TestMain(m *testing.M) {
	os.Exit(withShared(m))
}

func withShared(m *testing.M) int {
	dir, err := os.MkdirTemp("", "stipend-daemon")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	sharedDir = dir
	ready := make(chan Addresses, 1)
	cfg := testConfig(dir)
	cfg.Logger = slog.New(journal)
	cfg.Ready = func(a Addresses) { ready <- a }
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, cfg) }()
	select {
	case at := <-ready:
		conn, err := grpc.NewClient("passthrough:///"+at.GRPC.String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			panic(err)
		}
		shared.r = &running{at: at, conn: conn, policies: stipendv1.NewPolicyServiceClient(conn),
			checks: stipendv1.NewCheckServiceClient(conn), inspect: stipendv1.NewInspectServiceClient(conn)}
	case err := <-ended:
		panic(err)
	}
	code := m.Run()
	shared.r.conn.Close()
	cancel()
	if err := <-ended; err != nil {
		panic(err)
	}
	// Every goroutine of every daemon of this binary must have ended.
	http.DefaultClient.CloseIdleConnections()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

func (r *running) get(path string) (int, string) {
	r.t.Helper()
	resp, err := http.Get("http://" + r.at.HTTP.String() + path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// log is a slog.Handler that tests wait on instead of polling.
type log struct {
	mu    sync.Mutex
	lines []string
	more  chan struct{}
}

// journal is the shared daemon's log.
var journal = &log{more: make(chan struct{})}

func (l *log) Enabled(context.Context, slog.Level) bool { return true }
func (l *log) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *log) WithGroup(string) slog.Handler            { return l }

func (l *log) Handle(_ context.Context, r slog.Record) error {
	line := r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += " " + a.Value.String()
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
	close(l.more)
	l.more = make(chan struct{})
	return nil
}

// await waits for a line that holds all parts.
func (l *log) await(t *testing.T, parts ...any) {
	t.Helper()
	ctx := ctxOf(t)
	for {
		l.mu.Lock()
		lines, more := l.lines, l.more
		l.mu.Unlock()
		for _, line := range lines {
			all := true
			for _, p := range parts {
				all = all && strings.Contains(line, fmt.Sprint(p))
			}
			if all {
				return
			}
		}
		select {
		case <-more:
		case <-ctx.Done():
			t.Fatalf("never logged: %v", parts)
		}
	}
}
