package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// lookEvery is how often the authority and the agents are asked.
const lookEvery = time.Second

// watch asks the authority and the agents how they are. It judges nothing: the
// bound and the utilisation rest on the backend's records alone.
type watch struct {
	plan  *plan
	files *files
	conn  *grpc.ClientConn

	mu sync.Mutex
	// pages holds the last metrics page of each incarnation of each agent.
	pages [gateways][]samples
	first *stipendv1.Account // of the first tenant
	dead  string             // name of the agent that was killed
	diedW grant.Units
}

func newWatch(p *plan, f *files) (*watch, error) {
	conn, err := grpc.NewClient(f.authority, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	w := &watch{plan: p, files: f, conn: conn}
	for i := range w.pages {
		w.pages[i] = []samples{nil}
	}
	return w, nil
}

func (w *watch) close() error { return w.conn.Close() }

// apply sets the policies of all tenants.
func (w *watch) apply(ctx context.Context) error {
	client := stipendv1.NewPolicyServiceClient(w.conn)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(32)
	for _, t := range w.plan.tenants {
		g.Go(func() error {
			_, err := client.PutPolicy(ctx, &stipendv1.PutPolicyRequest{Tenant: string(t.id), Policy: wire.ToPolicy(t.policy), AnyVersion: true})
			if err != nil {
				return fmt.Errorf("set the policy of tenant %q: %w", t.id, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// run looks now and then until ctx ends. What cannot be reached at a moment is
// looked at the next time.
func (w *watch) run(ctx context.Context) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		w.look(ctx)
	}
}

func (w *watch) look(ctx context.Context) {
	var g errgroup.Group
	for i := range gateways {
		g.Go(func() error {
			w.mu.Lock()
			life := len(w.pages[i]) - 1
			w.mu.Unlock()
			page, err := scrape(ctx, "http://"+w.files.agents[i].admin+"/metrics")
			w.mu.Lock()
			defer w.mu.Unlock()
			if err == nil && life == len(w.pages[i])-1 {
				w.pages[i][life] = page
			}
			return nil
		})
	}
	g.Go(func() error {
		a, err := w.account(ctx)
		if err == nil {
			w.mu.Lock()
			w.first = a
			w.mu.Unlock()
		}
		return nil
	})
	g.Wait()
}

// account asks the authority for the first tenant's.
func (w *watch) account(ctx context.Context) (*stipendv1.Account, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	got, err := stipendv1.NewInspectServiceClient(w.conn).GetTenant(ctx, &stipendv1.GetTenantRequest{Tenant: string(w.plan.tenants[0].id)})
	if err != nil {
		return nil, err
	}
	if got.GetOrdinary() == nil {
		return nil, errors.New("the authority's answer has no account")
	}
	return got.GetOrdinary(), nil
}

// died notes what an agent that was just killed held, as far as the authority
// knows, and keeps its last metrics.
func (w *watch) died(ctx context.Context, i int) {
	a, err := w.account(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pages[i] = append(w.pages[i], nil)
	w.dead = w.files.agents[i].name
	if err != nil {
		return
	}
	w.first = a
	for _, o := range a.GetOwners() {
		if o.GetOwner() == w.dead {
			w.diedW = max(w.diedW, grant.Units(o.GetOutstanding()))
		}
	}
}

// outstanding is what the authority said last of the first tenant.
func (w *watch) outstanding() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.first.GetOutstanding()
}

// all is every metrics page kept.
func (w *watch) all() samples {
	var out samples
	for _, lives := range w.pages {
		for _, page := range lives {
			out = append(out, page...)
		}
	}
	return out
}

// into fills in what was seen last.
func (w *watch) into(res *Result) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.all()
	per := 1000 / max(float64(res.Admitted), 1)
	res.Messages, res.GrantRequests, res.Checks = all.sum(metricMessages)*per, all.sum(metricGrantRequests)*per, all.sum(metricChecks)*per
	for _, one := range []struct{ name, path, waited string }{
		{"from the wallet, at once", "local", "false"},
		{"from the wallet, after waiting for units", "local", "true"},
		{"checked at the authority", "central", "true"},
	} {
		s := all.histogram(metricDecision, "path", one.path, "waited", one.waited)
		p50, ok := s.quantile(0.5)
		if !ok {
			continue
		}
		p99, _ := s.quantile(0.99)
		res.Latency = append(res.Latency, Latency{Path: one.name, N: int64(s.counts[len(s.counts)-1]), P50: p50, P99: p99})
	}
	a := w.first
	res.Units = Units{
		Granted: grant.Units(a.GetGranted()), Outstanding: grant.Units(a.GetOutstanding()), Expired: grant.Units(a.GetExpired()),
		DiedWith: w.diedW, Died: w.dead,
	}
}

// into fills in what the load got for answers.
func (l *load) into(res *Result) {
	for r := range l.roles {
		o := &l.roles[r]
		if o.sent.Load() == 0 && o.skipped.Load() == 0 {
			continue
		}
		a := Answers{
			Role: role(r).String(), Sent: o.sent.Load(), OK: o.ok.Load(), Limited: o.limited.Load(), Undecided: o.undecided.Load(),
			Unverified: o.unverified.Load(), Unrouted: o.unrouted.Load(), Other: o.other.Load(), Broken: o.broken.Load(), Skipped: o.skipped.Load(),
		}
		res.Answers = append(res.Answers, a)
		if a.Skipped > 0 {
			res.Notes = append(res.Notes, fmt.Sprintf("%d requests of %s were not sent: too many were in flight", a.Skipped, a.Role))
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, why := range slices.Sorted(maps.Keys(l.reasons)) {
		res.Notes = append(res.Notes, fmt.Sprintf("503 for %s: %d times", why, l.reasons[why]))
	}
	if s := l.strange.Load(); s != nil {
		res.Notes = append(res.Notes, "an answer that nothing explains: "+*s)
	}
}

// line makes the state line.
type line struct {
	world   *world
	units   grant.Units
	limited int64
	last    time.Duration
	rate    float64 // of admitted units, smoothed
	refused float64
}

func (l *line) next(at time.Duration) string {
	w := l.world
	units, all, excess := w.backend.soFar()
	first := w.plan.tenants[0]
	if first.role != hot {
		units = all
	}
	o := &w.load.roles[first.role]
	limited := o.limited.Load()
	if dt := (at - l.last).Seconds(); dt > 0 {
		// Over about a second: the line is refreshed more often than rates are
		// of interest.
		weight := min(1, dt)
		l.rate += weight * (float64(units-l.units)/dt - l.rate)
		l.refused += weight * (float64(limited-l.limited)/dt - l.refused)
	}
	l.units, l.limited, l.last = units, limited, at
	slack := first.policy.Burst
	if first.policy.Grant.Enabled() {
		slack += first.policy.Grant.Slack()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%5.1fs  ", at.Seconds())
	if first.role == hot {
		fmt.Fprintf(&b, "%s %3.0f of %d/s, 429 %3.0f/s, excess %d of %d |", first.id, l.rate, first.policy.Rate.Units, l.refused, excess, slack)
	} else {
		fmt.Fprintf(&b, "admitted %3.0f/s, 429 %3.0f/s, busiest tenant's excess %d of %d |", l.rate, l.refused, excess, slack)
	}
	fav := w.plan.favourite(at)
	for i := range gateways {
		mark := [gateways]string{"90%", " 9%", " 1%"}[(i-fav+gateways)%gateways]
		if !w.isAlive(i) {
			mark = "dead"
		}
		fmt.Fprintf(&b, " %s %s", w.files.agents[i].name, mark)
	}
	if w.load.roles[cold].sent.Load() > 0 {
		fmt.Fprintf(&b, " | cold %d ok | abuser 429 %d, 401 %d", w.load.roles[cold].ok.Load(), w.load.roles[over].limited.Load(), w.load.roles[unverified].unverified.Load())
	}
	fmt.Fprintf(&b, " | held %d", w.watch.outstanding())
	return b.String()
}
