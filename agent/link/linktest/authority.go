// Package linktest is an authority in memory for tests of the agent: it keeps
// buckets, grants and decisions by the rules of the protocol, but forgets
// everything when it ends and has no partitions, commits or fairness. It can be
// told to misbehave: to fall silent, to be overloaded, to hang up.
package linktest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// Mood is how the authority behaves.
type Mood int

const (
	Well       Mood = iota
	Silent          // reads everything, answers nothing: not even Open
	Overloaded      // answers everything with "overloaded"
	Forgetful       // answers everything with "unknown session"
)

type tenant struct {
	policy   *grant.Policy
	version  uint64
	level    grant.Units
	carry    int64
	last     time.Time
	holdings map[grant.Incarnation]*holding
	denied   grant.Units // queued ahead, for Retry-After
	Granted  grant.Units
	Checked  grant.Units
}

type holding struct {
	units   grant.Units
	expires time.Time
	req     grant.GrantRequest
	ans     grant.GrantAnswer
}

type parked struct {
	s *session
	r grant.GrantRequest
}

type session struct {
	inc    grant.Incarnation
	stream stipendv1.LinkService_LinkServer
	mu     sync.Mutex // one sender at a time
	end    chan struct{}
	once   sync.Once
}

// Authority is the fake. Close ends its goroutines.
type Authority struct {
	stipendv1.UnimplementedLinkServiceServer

	lis *bufconn.Listener
	srv *grpc.Server
	wg  sync.WaitGroup

	mu        sync.Mutex
	mood      Mood
	turn      chan struct{} // closed when the mood changes
	tenants   map[grant.TenantID]*tenant
	decisions map[grant.Attempt]grant.CheckAnswer
	parked    []parked
	sessions  map[*session]bool
	opened    int
	batches   []int // entries per batch received
	discarded map[grant.Incarnation]bool
	done      chan struct{}
}

// New starts an authority on an in-memory network.
func New() *Authority {
	a := &Authority{
		lis: bufconn.Listen(1 << 20), srv: grpc.NewServer(), turn: make(chan struct{}),
		tenants: map[grant.TenantID]*tenant{}, decisions: map[grant.Attempt]grant.CheckAnswer{},
		sessions: map[*session]bool{}, discarded: map[grant.Incarnation]bool{}, done: make(chan struct{}),
	}
	stipendv1.RegisterLinkServiceServer(a.srv, a)
	a.wg.Add(2)
	go func() { defer a.wg.Done(); a.srv.Serve(a.lis) }()
	go func() { defer a.wg.Done(); a.wakeParked() }()
	return a
}

// Dial connects to it.
func (a *Authority) Dial(ctx context.Context, _ string) (net.Conn, error) {
	return a.lis.DialContext(ctx)
}

// Close ends it and waits for its goroutines.
func (a *Authority) Close() {
	close(a.done)
	a.HangUp()
	a.srv.Stop()
	a.lis.Close()
	a.wg.Wait()
}

// Put sets the policy of a tenant; a new tenant starts with a full bucket. An
// invalid policy, which no authority would have taken, ends the test.
func (a *Authority) Put(id grant.TenantID, p *grant.Policy) {
	if faults := p.Validate(); len(faults) > 0 {
		panic(faults[0])
	}
	a.mu.Lock()
	t := a.tenants[id]
	if t == nil {
		t = &tenant{level: p.Burst, last: time.Now(), holdings: map[grant.Incarnation]*holding{}}
		a.tenants[id] = t
	} else {
		t.refill(time.Now())
	}
	t.policy = p
	t.version++
	t.level = min(t.level, p.Burst)
	push := &stipendv1.NodeBatch{Policies: []*stipendv1.TenantPolicy{
		wire.ToTenantPolicy(wire.TenantPolicy{Tenant: id, Version: t.version, Policy: p})}}
	var to []*session
	if a.mood == Well {
		for s := range a.sessions {
			to = append(to, s)
		}
	}
	a.mu.Unlock()
	for _, s := range to {
		s.send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Batch{Batch: push}})
	}
}

// SetMood changes the behaviour; coming out of Silent answers what waited for
// a welcome, nothing else.
func (a *Authority) SetMood(m Mood) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mood = m
	close(a.turn)
	a.turn = make(chan struct{})
}

// HangUp breaks every stream.
func (a *Authority) HangUp() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for s := range a.sessions {
		s.once.Do(func() { close(s.end) })
	}
}

// Drain asks every agent to come again.
func (a *Authority) Drain() {
	a.mu.Lock()
	var to []*session
	for s := range a.sessions {
		to = append(to, s)
	}
	a.mu.Unlock()
	for _, s := range to {
		s.send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Drain{Drain: &stipendv1.Drain{}}})
	}
}

// Fate sends the fate of every incarnation.
func (a *Authority) Fate(r grant.Reason) {
	a.mu.Lock()
	var to []*session
	for s := range a.sessions {
		to = append(to, s)
	}
	a.mu.Unlock()
	for _, s := range to {
		s.send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Batch{Batch: &stipendv1.NodeBatch{Fate: wire.ToReason(r)}}})
	}
}

// Deducted is what was granted and what was allowed by Checks.
func (a *Authority) Deducted(id grant.TenantID) (granted, checked grant.Units) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t := a.tenants[id]; t != nil {
		return t.Granted, t.Checked
	}
	return 0, 0
}

// Opened is the number of streams that sent Open.
func (a *Authority) Opened() int { a.mu.Lock(); defer a.mu.Unlock(); return a.opened }

// Batches are the sizes of the batches received, in order.
func (a *Authority) Batches() []int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]int(nil), a.batches...)
}

// Discarded reports whether the incarnation discarded its wallets.
func (a *Authority) Discarded(i grant.Incarnation) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.discarded[i]
}

func (s *session) send(f *stipendv1.LinkResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stream.Send(f) // a broken stream shows at its reader
}

func (a *Authority) awaitVoice(s *session) bool {
	for {
		a.mu.Lock()
		mood, turn := a.mood, a.turn
		a.mu.Unlock()
		if mood != Silent {
			return true
		}
		select {
		case <-turn:
		case <-s.end:
			return false
		case <-s.stream.Context().Done():
			return false
		}
	}
}

// Link serves one stream.
func (a *Authority) Link(stream stipendv1.LinkService_LinkServer) error {
	f, err := stream.Recv()
	if err != nil {
		return err
	}
	open := f.GetOpen()
	inc, err := wire.FromIncarnation(open.GetIncarnation())
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if _, err := wire.FromOwner(open.GetOwner()); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	s := &session{inc: inc, stream: stream, end: make(chan struct{})}
	a.mu.Lock()
	a.opened++
	a.sessions[s] = true
	a.mu.Unlock()
	defer func() { a.mu.Lock(); delete(a.sessions, s); a.mu.Unlock() }()
	if !a.awaitVoice(s) {
		return status.Error(codes.Unavailable, "hung up")
	}
	s.send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Welcome{Welcome: &stipendv1.Welcome{
		Store: "fake", MaxBatch: 256, Tolerance: durationpb.New(100 * time.Millisecond),
	}}})

	frames := make(chan *stipendv1.LinkRequest)
	broken := make(chan error, 1)
	go func() {
		for {
			f, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			select {
			case frames <- f:
			case <-stream.Context().Done():
				broken <- stream.Context().Err()
				return
			}
		}
	}()
	for {
		select {
		case <-s.end:
			return status.Error(codes.Unavailable, "hung up")
		case err := <-broken:
			return err
		case f := <-frames:
			if err := a.frame(s, f); err != nil {
				return err
			}
		}
	}
}

func (a *Authority) frame(s *session, f *stipendv1.LinkRequest) error {
	a.mu.Lock()
	mood := a.mood
	a.mu.Unlock()
	switch f := f.GetFrame().(type) {
	case *stipendv1.LinkRequest_Batch:
		out := &stipendv1.NodeBatch{}
		a.mu.Lock()
		a.batches = append(a.batches, len(f.Batch.GetGrants())+len(f.Batch.GetChecks()))
		for _, m := range f.Batch.GetGrants() {
			r, err := wire.FromGrantRequest(m, s.inc)
			if err != nil {
				a.mu.Unlock()
				return status.Error(codes.InvalidArgument, err.Error())
			}
			ans := a.grant(s, r, mood, true)
			out.Grants = append(out.Grants, wire.ToGrantResponse(&ans))
		}
		for _, m := range f.Batch.GetChecks() {
			r, err := wire.FromCheckRequest(m, s.inc)
			if err != nil {
				a.mu.Unlock()
				return status.Error(codes.InvalidArgument, err.Error())
			}
			ans := a.check(r, mood)
			out.Checks = append(out.Checks, wire.ToCheckResponse(&ans))
		}
		a.mu.Unlock()
		if mood != Silent {
			s.send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Batch{Batch: out}})
		}
	case *stipendv1.LinkRequest_Discard:
		if mood == Silent {
			return nil
		}
		a.mu.Lock()
		a.discarded[s.inc] = true
		for _, t := range a.tenants {
			delete(t.holdings, s.inc)
		}
		a.mu.Unlock()
		s.send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Discarded{Discarded: &stipendv1.Discarded{}}})
	default:
		return errors.New("linktest: unexpected frame")
	}
	return nil
}

func (t *tenant) refill(now time.Time) {
	if now.After(t.last) {
		var add grant.Units
		add, t.carry = t.policy.Rate.AccrueFloor(now.Sub(t.last), t.carry)
		t.last = now
		if t.level += add; t.level >= t.policy.Burst {
			t.level, t.carry = t.policy.Burst, 0
		}
	}
}

// outstanding of all owners but not, expired ones dropped.
func (t *tenant) outstanding(now time.Time, not grant.Incarnation) (sum grant.Units) {
	for inc, h := range t.holdings {
		if now.After(h.expires) {
			h.units = 0
		}
		if inc != not {
			sum += h.units
		}
	}
	return sum
}

func (a *Authority) grant(s *session, r grant.GrantRequest, mood Mood, mayPark bool) grant.GrantAnswer {
	ans := grant.GrantAnswer{Tenant: r.Tenant, Incarnation: r.Incarnation, Emergency: r.Emergency, ID: r.ID}
	switch mood {
	case Silent, Overloaded:
		ans.Result, ans.Reason = grant.Busy, grant.Overloaded
		return ans
	case Forgetful:
		ans.Result, ans.Reason = grant.Busy, grant.UnknownSession
		return ans
	}
	t := a.tenants[r.Tenant]
	if t == nil || r.Emergency {
		ans.Result, ans.Reason = grant.Refused, grant.UnknownTenant
		return ans
	}
	ans.Policy = grant.PolicyCopy{Version: t.version, Policy: t.policy}
	now := time.Now()
	t.refill(now)
	h := t.holdings[r.Incarnation]
	if h == nil {
		h = &holding{}
		t.holdings[r.Incarnation] = h
	}
	outside := t.outstanding(now, r.Incarnation)
	switch {
	case r.ID == h.req.ID && r.Sum == h.req.Sum && h.ans.Result != 0:
		return h.ans
	case r.ID == h.req.ID && h.ans.Result != 0:
		ans.Result, ans.Reason = grant.Refused, grant.Conflict
		return ans
	case r.ID < h.req.ID:
		ans.Result, ans.Reason = grant.Refused, grant.Stale
		return ans
	case r.Held > h.units:
		ans.Result, ans.Reason = grant.Refused, grant.HeldExceeds
		h.req, h.ans = r, ans
		return ans
	}
	g := t.policy.Grant
	room := min(g.Quantum-r.Held, g.Slack()-outside-r.Held)
	switch {
	case !g.Enabled() || room < r.Min:
		ans.Result, ans.Reason = grant.Empty, grant.NoRoom
	case t.level >= r.Min:
		ans.Result, ans.Units, ans.TTL = grant.Granted, min(r.Want, room, t.level), g.TTL
		t.level -= ans.Units
		t.Granted += ans.Units
		h.units, h.expires = r.Held+ans.Units, now.Add(g.TTL)
	default:
		ans.Result, ans.Reason = grant.Parked, grant.Over
		wait, ok := t.policy.Rate.DurationCeil(r.Min-t.level, t.carry)
		if !ok {
			wait = time.Hour
		}
		ans.Wait = wait
		if mayPark {
			a.parked = append(a.parked, parked{s, r})
		}
		return ans
	}
	h.req, h.ans = r, ans
	return ans
}

func (a *Authority) check(r grant.CheckRequest, mood Mood) grant.CheckAnswer {
	ans := grant.CheckAnswer{Tenant: r.Tenant, Attempt: r.Attempt, Verdict: grant.Undecided}
	switch mood {
	case Silent, Overloaded:
		ans.Reason = grant.Overloaded
		return ans
	case Forgetful:
		ans.Reason = grant.UnknownSession
		return ans
	}
	if old, ok := a.decisions[r.Attempt]; ok {
		old.Replayed = true
		return old
	}
	t := a.tenants[r.Tenant]
	if t == nil {
		ans.Verdict, ans.Reason = grant.Deny, grant.UnknownTenant
		return ans
	}
	t.refill(time.Now())
	ans.Policy = grant.PolicyCopy{Version: t.version, Policy: t.policy}
	price, _, why := t.policy.Price(r.Class, r.Count)
	ans.Cost = price
	switch {
	case why != grant.None:
		ans.Verdict, ans.Reason = grant.Deny, why
	case price > t.policy.Burst:
		ans.Verdict, ans.Reason = grant.Deny, grant.CostExceedsBurst
	case price > t.level && t.policy.Mode == grant.Enforce:
		ans.Verdict, ans.Reason = grant.Deny, grant.Over
		ans.Affordable, _ = t.policy.Rate.DurationCeil(price-t.level, t.carry)
		t.denied += price // spreads the refused over the refill of what waits before them
		ans.RetryAfter, _ = t.policy.Rate.DurationCeil(t.denied-t.level, t.carry)
	case price > t.level:
		ans.Verdict, ans.Shadow, ans.Reason = grant.Allow, true, grant.Over
	default:
		t.level -= price
		t.denied = 0
		t.Checked += price
		ans.Verdict = grant.Allow
		a.decisions[r.Attempt] = ans
	}
	ans.Remaining = t.level
	return ans
}

// wakeParked decides parked grants again every 5 ms.
func (a *Authority) wakeParked() {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-a.done:
			return
		case <-tick.C:
		}
		type reply struct {
			s   *session
			ans grant.GrantAnswer
		}
		var out []reply
		a.mu.Lock()
		if a.mood == Well {
			var rest []parked
			for _, p := range a.parked {
				if !a.sessions[p.s] {
					continue
				}
				if ans := a.grant(p.s, p.r, Well, false); ans.Result != grant.Parked {
					out = append(out, reply{p.s, ans})
				} else {
					rest = append(rest, p)
				}
			}
			a.parked = rest
		}
		a.mu.Unlock()
		for _, r := range out {
			r.s.send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Batch{Batch: &stipendv1.NodeBatch{
				Grants: []*stipendv1.GrantResponse{wire.ToGrantResponse(&r.ans)}}}})
		}
	}
}

// String is a line per tenant, for failing tests.
func (a *Authority) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := ""
	for id, t := range a.tenants {
		s += fmt.Sprintf("%s: level %d granted %d checked %d\n", id, t.level, t.Granted, t.Checked)
	}
	return s
}
