package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/stipend/stipend/agent/link"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// The bucket of every tenant, in both systems: large enough to allow all that
// is asked in a run, so that each decision is a durable one.
const (
	bucketRate  = 1_000_000
	bucketBurst = 1_000_000
)

// authorityServer is the real program with its store and its etcd.
type authorityServer struct {
	*child
	addr, http string
	dir        string
	conn       *grpc.ClientConn
}

func startAuthority(ctx context.Context, r *run, dir string) (*authorityServer, error) {
	var ports [2]int
	for i := range ports {
		var err error
		if ports[i], err = freePort(); err != nil {
			return nil, err
		}
	}
	s := &authorityServer{addr: fmt.Sprintf("127.0.0.1:%d", ports[0]), http: fmt.Sprintf("127.0.0.1:%d", ports[1]), dir: dir}
	var err error
	if s.child, err = start(ctx, filepath.Join(r.bin, "stipend-authority"), "--init", "--data", dir, "--listen", s.addr, "--http", s.http); err != nil {
		return nil, err
	}
	if err := s.until(ctx, time.Minute, httpOK("http://"+s.http+"/readyz")); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	s.conn, err = grpc.NewClient(s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func (s *authorityServer) close() error { return errors.Join(s.conn.Close(), s.stop()) }

// httpOK asks a readiness page.
func httpOK(url string) func(context.Context) error {
	return func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, res.Body)
		if err := errors.Join(err, res.Body.Close()); err != nil {
			return err
		}
		if res.StatusCode != http.StatusOK {
			return errors.New(res.Status)
		}
		return nil
	}
}

// logged is how many bytes of records the authority has committed since its start.
func (s *authorityServer) logged(ctx context.Context) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.http+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	raw, err := io.ReadAll(res.Body)
	if err := errors.Join(err, res.Body.Close()); err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(raw)) {
		if v, ok := strings.CutPrefix(line, "stipend_authority_commit_bytes_total "); ok {
			return strconv.ParseFloat(strings.TrimSpace(v), 64)
		}
	}
	return 0, errors.New("/metrics has no stipend_authority_commit_bytes_total")
}

// putPolicies gives every tenant a policy of its own.
func (s *authorityServer) putPolicies(ctx context.Context, tenants []string, settings grant.GrantSettings) error {
	p := wire.ToPolicy(benchPolicy(settings))
	admin := stipendv1.NewPolicyServiceClient(s.conn)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(256)
	for _, t := range tenants {
		g.Go(func() error {
			_, err := admin.PutPolicy(ctx, &stipendv1.PutPolicyRequest{Tenant: t, Policy: p, AnyVersion: true})
			return err
		})
	}
	return g.Wait()
}

func benchPolicy(settings grant.GrantSettings) *grant.Policy {
	return &grant.Policy{
		Rate: grant.Rate{Units: bucketRate, Per: time.Second}, Burst: bucketBurst,
		Classes: map[grant.RouteClass]grant.Class{"op": {Cost: 1}}, Grant: settings,
	}
}

// unaryDecider makes one unary call a decision, all on one connection.
func (s *authorityServer) unaryDecider() decide {
	client := stipendv1.NewCheckServiceClient(s.conn)
	inc := grant.NewIncarnation()
	var seq atomic.Uint64
	return func(ctx context.Context, _ int, tenant string) error {
		m, err := client.Check(ctx, &stipendv1.CheckRequest{Tenant: tenant, RouteClass: "op", Count: 1, Incarnation: inc[:], Sequence: seq.Add(1), KnownVersion: 1})
		if err == nil && m.GetVerdict() != stipendv1.Verdict_VERDICT_ALLOW {
			err = fmt.Errorf("check of %s: %v %v", tenant, m.GetVerdict(), m.GetReason())
		}
		return err
	}
}

// gateway is one agent's link and those who wait for its answers.
type gateway struct {
	link *link.Link
	inc  grant.Incarnation
	seq  atomic.Uint64
	up   chan struct{}
	once sync.Once

	checks []chan grant.CheckAnswer // by sequence mod slots
	grants sync.Map                 // tenant to chan grant.GrantAnswer: one grant of a tenant is in flight

	cancel context.CancelFunc
	done   chan error
}

// slots is how many attempts may be in flight: far more than there are callers,
// so that an attempt as old as that never meets a newer one.
const slots = 1 << 14

// openGateway opens a link and waits until it is up.
func (s *authorityServer) openGateway(ctx context.Context, owner string) (*gateway, error) {
	w := &gateway{inc: grant.NewIncarnation(), up: make(chan struct{}), done: make(chan error, 1)}
	cfg := link.Defaults()
	cfg.Target = s.addr
	l, err := link.New(cfg, link.Identity{Owner: grant.Owner(owner), Incarnation: w.inc, Build: "versus"}, link.Events{
		Up:      func(link.Peer) { w.once.Do(func() { close(w.up) }) },
		Down:    func(error) {},
		Failed:  func(error) {},
		Grant:   func(a grant.GrantAnswer) { w.grantsOf(a.Tenant) <- a },
		Check:   func(a grant.CheckAnswer) { w.checks[a.Attempt.Seq%slots] <- a },
		Policy:  func(wire.TenantPolicy) {},
		Fate:    func(grant.Reason) {},
		Problem: func(error) {},
	})
	if err != nil {
		return nil, err
	}
	w.link = l
	ctx, w.cancel = context.WithCancel(ctx)
	go func() { w.done <- l.Run(ctx) }()
	select {
	case <-w.up:
		return w, nil
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), w.close())
	}
}

func (w *gateway) grantsOf(t grant.TenantID) chan grant.GrantAnswer {
	if c, ok := w.grants.Load(t); ok {
		return c.(chan grant.GrantAnswer)
	}
	c, _ := w.grants.LoadOrStore(t, make(chan grant.GrantAnswer, 4))
	return c.(chan grant.GrantAnswer)
}

func (w *gateway) close() error {
	w.cancel()
	return <-w.done
}

// decider sends Checks of all callers over the one stream, whose batches emerge
// from what the callers ask at the same time.
func (w *gateway) decider() decide {
	w.checks = make([]chan grant.CheckAnswer, slots)
	for i := range w.checks {
		w.checks[i] = make(chan grant.CheckAnswer, 1)
	}
	return func(ctx context.Context, _ int, tenant string) error {
		req := grant.CheckRequest{
			Tenant: grant.TenantID(tenant), Class: "op", Count: 1,
			Attempt: grant.Attempt{Incarnation: w.inc, Seq: w.seq.Add(1)}, Budget: 10 * time.Second, KnownVersion: 1,
		}
		req.Sum = req.Fingerprint()
		if why := w.link.Check(&req); why != grant.None {
			return fmt.Errorf("link: %v", why)
		}
		select {
		case a := <-w.checks[req.Attempt.Seq%slots]:
			if a.Verdict != grant.Allow {
				return fmt.Errorf("check of %s: %v %v", tenant, a.Verdict, a.Reason)
			}
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// noGrants sends every request to the authority.
var noGrants = grant.GrantSettings{}
