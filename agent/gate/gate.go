package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/link"
	"github.com/stipend/stipend/proto/grant"
	"github.com/stipend/stipend/proto/wire"
)

// Request is one request to be decided.
type Request struct {
	Tenant grant.TenantID   // from verified credentials
	Class  grant.RouteClass // from a fixed list
	// Count is the number of operations; zero asks without spending.
	Count grant.Units
}

// Admission is one admitted request, for the record that the checker reads.
type Admission struct {
	Request
	Decision agent.Decision
	// Wall is the wall time of Decision.At, as the process's clock had it when
	// the attempt began, in nanoseconds since 1970.
	Wall grant.Instant
}

// warnEvery is how often at most the log says that there is no authority.
const warnEvery = 30 * time.Second

// drainQuiet: a gate that drains ends when nobody asked for this long.
const drainQuiet = time.Second

const (
	idle int32 = iota
	running
	closed
)

// Gate decides requests. Safe for use by many goroutines.
type Gate struct {
	cfg      Config
	machines agent.Config
	inc      grant.Incarnation
	log      *slog.Logger
	record   func(Admission)

	guard    *guard
	table    *table
	alarms   alarms
	calls    calls
	link     *link.Link
	low      chan *entry
	counters counters
	pool     sync.Pool // of chan agent.Decision

	state    atomic.Int32
	linkUp   atomic.Bool
	everUp   atomic.Bool
	draining atomic.Bool
	drained  atomic.Bool
	asked    atomic.Int64 // instant of the last slow decision while draining
	ticket   atomic.Uint64
	seq      atomic.Uint64
	fate     atomic.Uint32 // a grant.Reason
	shorter  atomic.Int64  // of agent.Tenant.Shorten, in nanoseconds

	failures int           // to reach the authority, since it was there last; the link's goroutine
	warned   grant.Instant // of them, when the log told; the same

	retired  agent.Stats // of forgotten tenants; guarded by table.mu
	evicted  atomic.Uint64
	refused  atomic.Uint64
	ceiling  atomic.Uint64
	problems atomic.Uint64
}

// New makes a gate of a fresh incarnation.
func New(cfg Config) (*Gate, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("gate: %w", err)
	}
	g := &Gate{
		cfg: cfg, inc: grant.NewIncarnation(), log: cfg.Log, record: cfg.Record,
		guard:  newGuard(cfg.Clock, cfg.Tolerance),
		table:  newTable(),
		alarms: alarms{nudge: make(chan struct{}, 1)},
		calls: calls{max: cfg.MaxChecks, share: cfg.MaxChecksPerTenant, life: grant.Instant(cfg.Authority.Silence),
			open: make(map[uint64]*entry)},
		low: make(chan *entry, 1024),
	}
	if g.log == nil {
		g.log = slog.Default()
	}
	g.pool.New = func() any { return make(chan agent.Decision, 1) }
	g.machines = agent.DefaultConfig()
	g.machines.Tolerance, g.machines.Deadline = cfg.Tolerance, cfg.Deadline
	g.machines.HotPerSecond, g.machines.LostAfter = cfg.HotPerSecond, cfg.LostAfter
	g.machines.MaxWaiters = cfg.MaxWaiters
	g.machines.NextSeq = func() uint64 { return g.seq.Add(1) }
	g.machines.Rand = rand.Int64N
	if err := g.machines.Validate(); err != nil {
		return nil, fmt.Errorf("gate: %w", err)
	}
	var err error
	g.link, err = link.New(cfg.Authority, link.Identity{Owner: cfg.Owner, Incarnation: g.inc, Build: cfg.Build}, link.Events{
		Up: g.up, Down: g.down, Failed: g.failed, Grant: g.granted, Check: g.checked, Policy: g.pushed, Fate: g.fated,
		Problem: func(err error) { g.problems.Add(1); g.log.Warn("answer not understood", "err", err) },
	})
	if err != nil {
		return nil, fmt.Errorf("gate: %w", err)
	}
	return g, nil
}

// Incarnation is this gate's.
func (g *Gate) Incarnation() grant.Incarnation { return g.inc }

// Ready tells why the gate cannot decide everything it is asked, or nil.
func (g *Gate) Ready() error {
	switch {
	case g.drained.Load():
		return errors.New("drained")
	case g.draining.Load():
		return errors.New("draining")
	case g.state.Load() != running:
		return errors.New("not running")
	case !g.linkUp.Load():
		if fail := g.link.State().LastFail; fail != "" {
			return fmt.Errorf("no link to the authority: %s", fail)
		}
		return errors.New("no link to the authority")
	case g.fate.Load() != 0:
		return fmt.Errorf("the authority grants nothing to this process: %s", g.told(grant.Reason(g.fate.Load())))
	}
	return nil
}

// Run drives the gate until ctx ends or Drain is through. Requests that wait
// then are answered as undecided.
func (g *Gate) Run(ctx context.Context) error {
	if !g.state.CompareAndSwap(idle, running) {
		return errors.New("gate: Run was called before")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g.guard.look(true, g.distrust)
	eg, ctx := errgroup.WithContext(ctx)
	eg.Go(func() error {
		defer cancel() // the link ends first after a discard
		return g.link.Run(ctx)
	})
	eg.Go(func() error { return g.watch(ctx) })
	eg.Go(func() error { return g.timers(ctx) })
	err := eg.Wait()
	g.shut()
	return err
}

// watch runs the clock guard, and forgets idle tenants little by little.
func (g *Gate) watch(ctx context.Context) error {
	t := time.NewTicker(guardEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		g.guard.look(true, g.distrust)
		g.table.mu.Lock()
		g.forget(256)
		g.table.mu.Unlock()
	}
}

// timers ticks the machines whose time has come and those that run low.
func (g *Gate) timers(ctx context.Context) error {
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		now := g.guard.now()
		e, next := g.alarms.due(now.Mono)
		if e != nil {
			g.tick(e)
			continue
		}
		t.Reset(min(next.Sub(now.Mono), time.Hour))
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		case <-g.alarms.nudge:
		case e := <-g.low:
			e.lowSet.Store(false)
			g.tick(e)
		}
	}
}

func (g *Gate) tick(e *entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone {
		return
	}
	now := g.guard.now()
	e.tenant.Tick(now, &e.fx)
	g.settle(e, now)
}

// forget drops idle tenants among the next n slots; table.mu is held.
func (g *Gate) forget(n int) int {
	now := g.guard.now()
	freed := g.table.forget(n, func(e *entry) bool {
		if len(e.waiters) > 0 || !e.tenant.Idle(now) {
			return false
		}
		g.retired = sum(g.retired, e.tenant.Stats())
		g.alarms.set(e, grant.Never)
		return true
	})
	g.evicted.Add(uint64(freed))
	return freed
}

func (g *Gate) distrust(now agent.Reading) {
	g.log.Warn("a clock moved or the machine slept: what is held is dropped")
	for _, e := range g.table.all() {
		e.mu.Lock()
		e.tenant.Distrust(now)
		g.settle(e, now)
		e.mu.Unlock()
	}
}

// Decide answers one request. It returns within the smaller of Config.Deadline
// and ctx, and never with Outcome Waiting.
func (g *Gate) Decide(ctx context.Context, r Request) (d agent.Decision) {
	now := g.guard.now()
	e := g.table.get(r.Tenant)
	trusted := int64(now.Mono) < g.guard.fresh.Load()
	if e != nil && trusted {
		var ok bool
		if d, ok = e.tenant.Take(now, r.Class, r.Count); ok {
			if e.tenant.Low() {
				g.runsLow(e)
			}
			g.note(&r, &d, now, false)
			return d
		}
	}
	if !trusted {
		g.guard.look(false, g.distrust)
	}
	var waited bool
	d, waited = g.judge(ctx, &r, e, now)
	d.Start = now.Mono
	if d.At == 0 {
		d.At = now.Mono
	}
	g.note(&r, &d, now, waited)
	return d
}

// note counts and records a decision. The time of those that did not wait is
// taken from a sample.
func (g *Gate) note(r *Request, d *agent.Decision, start agent.Reading, waited bool) {
	mix := scatter(start.Mono)
	g.counters.add(mix, d)
	if waited || mix>>32%localSample == 0 {
		g.counters.took(d.Path, waited, g.guard.now().Mono.Sub(start.Mono))
	}
	if g.record != nil && d.Outcome == agent.Admitted {
		g.record(Admission{*r, *d, start.Wall + d.At - start.Mono})
	}
}

// judge is the slow path; e is the tenant's entry if it has one.
func (g *Gate) judge(ctx context.Context, r *Request, e *entry, start agent.Reading) (d agent.Decision, waited bool) {
	no := func(o agent.Outcome, why grant.Reason) (agent.Decision, bool) {
		return agent.Decision{Outcome: o, Reason: why}, false
	}
	switch {
	case r.Count < 0 || r.Class.Validate() != nil:
		return no(agent.Rejected, grant.Invalid)
	case g.state.Load() != running:
		return no(agent.Undecided, grant.Unavailable)
	case ctx.Err() != nil:
		return no(agent.Undecided, grant.Deadline)
	}
	if g.draining.Load() {
		g.asked.Store(int64(start.Mono))
	}
	now, budget := start, g.cfg.Deadline
	mine := e != nil && e.mu.TryLock()
	if mine && e.gone {
		e.mu.Unlock()
		mine = false
	}
	if !mine {
		var why grant.Reason
		if e, why = g.locked(r.Tenant); e == nil {
			if why == grant.Invalid {
				return no(agent.Rejected, why)
			}
			return no(agent.Undecided, why)
		}
		// The lock may have taken a while: the machine sees the time of now,
		// the caller gets what is left of the budget.
		now = g.guard.now()
		budget -= now.Mono.Sub(start.Mono)
	}
	if until, ok := ctx.Deadline(); ok {
		budget = min(budget, time.Until(until))
	}
	switch {
	case g.state.Load() != running: // again: shut visits whom it finds waiting
		e.mu.Unlock()
		return no(agent.Undecided, grant.Unavailable)
	case budget <= 0:
		e.mu.Unlock()
		return no(agent.Undecided, grant.Deadline)
	}
	ticket := g.ticket.Add(1)
	d = e.tenant.Ask(now, agent.Ask{Ticket: ticket, Class: r.Class, Count: r.Count, Budget: budget}, &e.fx)
	if d.Outcome != agent.Waiting {
		g.settle(e, now)
		e.mu.Unlock()
		return d, false
	}
	ch := g.pool.Get().(chan agent.Decision)
	e.waiters[ticket] = ch
	g.settle(e, now)
	e.mu.Unlock()

	select {
	case d = <-ch:
	case <-ctx.Done():
		e.mu.Lock()
		var ok bool
		now := g.guard.now()
		if d, ok = e.tenant.GiveUp(now, ticket, &e.fx); ok {
			delete(e.waiters, ticket)
		}
		g.settle(e, now)
		e.mu.Unlock()
		if !ok { // resolved meanwhile, under the same lock: the answer is there
			d = <-ch
		}
	}
	g.pool.Put(ch)
	return d, true
}

// locked returns the tenant's entry with its lock held, a new one if need be;
// nil and the reason when there can be none.
func (g *Gate) locked(id grant.TenantID) (*entry, grant.Reason) {
	for {
		if e := g.table.get(id); e != nil {
			e.mu.Lock()
			if !e.gone {
				return e, grant.None
			}
			e.mu.Unlock()
		}
		if id.Validate() != nil {
			return nil, grant.Invalid
		}
		g.table.mu.Lock()
		if g.table.get(id) != nil {
			g.table.mu.Unlock()
			continue
		}
		if g.table.live >= g.cfg.MaxTenants && g.forget(256) == 0 {
			g.table.mu.Unlock()
			g.refused.Add(1)
			return nil, grant.Overloaded
		}
		e := &entry{id: id, tenant: agent.NewTenant(g.machines, id, g.inc), waiters: map[uint64]chan agent.Decision{}, place: -1}
		e.mu.Lock()
		g.table.put(e)
		g.table.mu.Unlock()
		// up and down set linkUp and shorter before they visit the entries: this
		// one is among them, or reads the new values here.
		now := g.guard.now()
		e.tenant.Shorten(time.Duration(g.shorter.Load()))
		e.tenant.Link(now, g.linkUp.Load(), &e.fx)
		if why := grant.Reason(g.fate.Load()); why != grant.None {
			e.tenant.Fate(now, why, &e.fx)
		}
		if g.draining.Load() {
			e.tenant.Drain(now, &e.fx)
		}
		return e, grant.None
	}
}

// settle carries out the effects of an entry whose lock is held: it answers
// waiters, sends requests, and sets the alarm.
func (g *Gate) settle(e *entry, now agent.Reading) {
	// What the link does not take is answered at once; the answer may have
	// effects of its own. A machine that asks again at once, whatever it hears,
	// must not hold us here: what is left after three rounds waits for its tick.
	for range 3 {
		if len(e.fx.Grants)+len(e.fx.Checks)+len(e.fx.Resolved) == 0 {
			break
		}
		cur := e.fx
		e.fx, e.spare = e.spare, agent.Effects{}
		for _, r := range cur.Resolved {
			if ch := e.waiters[r.Ticket]; ch != nil {
				delete(e.waiters, r.Ticket)
				ch <- r.Decision // has room for the one answer
			}
		}
		for i := range cur.Grants {
			r := &cur.Grants[i]
			if why := g.link.Grant(r); why != grant.None {
				e.tenant.Answer(now, grant.GrantAnswer{Tenant: e.id, Incarnation: g.inc, Emergency: r.Emergency,
					ID: r.ID, Result: grant.Busy, Reason: why}, &e.fx)
			}
		}
		for i := range cur.Checks {
			r := &cur.Checks[i]
			why := grant.Overloaded
			if g.calls.begin(e, r.Attempt.Seq, now.Mono) {
				if why = g.link.Check(r); why == grant.None {
					continue
				}
				g.calls.end(r.Attempt.Seq)
			} else {
				g.ceiling.Add(1)
			}
			e.tenant.Checked(now, grant.CheckAnswer{Tenant: e.id, Attempt: r.Attempt, Verdict: grant.Undecided, Reason: why}, &e.fx)
		}
		clear(cur.Grants)
		clear(cur.Checks)
		clear(cur.Resolved)
		e.spare = agent.Effects{Grants: cur.Grants[:0], Checks: cur.Checks[:0], Resolved: cur.Resolved[:0]}
	}
	g.alarms.set(e, e.tenant.Wake())
}

func (g *Gate) runsLow(e *entry) {
	if e.lowSet.CompareAndSwap(false, true) {
		select {
		case g.low <- e:
		default: // the timer loop is far behind; the next Ask asks as well
			e.lowSet.Store(false)
		}
	}
}

// Recheck says whether an admitted request may still go out. Call it right
// before the first byte does: not when the request was held up for longer than
// MaxForwardDelay, nor when a clock moved since its attempt began.
func (g *Gate) Recheck(d agent.Decision) bool {
	now := g.guard.now()
	if int64(now.Mono) >= g.guard.fresh.Load() {
		g.guard.look(false, g.distrust)
		now = g.guard.now()
	}
	return d.Outcome == agent.Admitted && now.Mono.Sub(d.Start) <= g.cfg.MaxForwardDelay && g.guard.steady(now, d.Start)
}

// visit calls f for every tenant, with its lock held.
func (g *Gate) visit(f func(*entry, agent.Reading)) {
	for _, e := range g.table.all() {
		e.mu.Lock()
		now := g.guard.now()
		f(e, now)
		g.settle(e, now)
		e.mu.Unlock()
	}
}

func (g *Gate) up(p link.Peer) {
	g.log.Info("link up", "store", p.Store, "was_lost", p.WasLost, "failed_attempts", g.failures)
	g.failures = 0
	shorter := max(g.cfg.Tolerance-p.Tolerance, time.Duration(g.shorter.Load())) // Up is called by one goroutine
	if shorter > time.Duration(g.shorter.Load()) {
		g.log.Warn("tolerance is larger than the authority's: grants live shorter by the difference", "tolerance", g.cfg.Tolerance, "authority", p.Tolerance)
	}
	g.shorter.Store(int64(shorter))
	g.linkUp.Store(true)
	g.everUp.Store(true)
	g.visit(func(e *entry, now agent.Reading) {
		e.tenant.Shorten(shorter)
		e.tenant.Link(now, true, &e.fx)
	})
}

func (g *Gate) down(err error) {
	if g.state.Load() == running {
		g.log.Warn("link down", "err", err)
	}
	g.linkUp.Store(false)
	g.calls.reset()
	g.visit(func(e *entry, now agent.Reading) { e.tenant.Link(now, false, &e.fx) })
}

// failed is called by the link's goroutine, as up and down are.
func (g *Gate) failed(err error) {
	now := g.guard.now().Mono
	if g.failures++; g.failures > 1 && now.Sub(g.warned) < warnEvery {
		return
	}
	g.warned = now
	g.log.Warn("cannot reach the authority", "authority", g.cfg.Authority.Target, "failed_attempts", g.failures, "err", err)
}

// of runs f for the tenant if it has state here.
func (g *Gate) of(id grant.TenantID, f func(*entry, agent.Reading)) {
	e := g.table.get(id)
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone {
		return
	}
	now := g.guard.now()
	f(e, now)
	g.settle(e, now)
}

func (g *Gate) granted(a grant.GrantAnswer) {
	g.of(a.Tenant, func(e *entry, now agent.Reading) { e.tenant.Answer(now, a, &e.fx) })
}

func (g *Gate) checked(a grant.CheckAnswer) {
	g.calls.end(a.Attempt.Seq)
	g.of(a.Tenant, func(e *entry, now agent.Reading) { e.tenant.Checked(now, a, &e.fx) })
}

func (g *Gate) pushed(p wire.TenantPolicy) {
	g.of(p.Tenant, func(e *entry, now agent.Reading) { e.tenant.Pushed(now, p.Version, p.Policy, p.Deleted, &e.fx) })
}

func (g *Gate) fated(why grant.Reason) {
	before := g.fate.Swap(uint32(why))                      // it is told again on every stream
	if g.state.Load() == running && before != uint32(why) { // not after our own discard
		g.log.Error("the authority grants nothing more to this process: "+g.told(why), "owner", g.cfg.Owner, "incarnation", g.inc, "reason", why)
	}
	g.visit(func(e *entry, now agent.Reading) { e.tenant.Fate(now, why, &e.fx) })
}

// told says what a fate means and what to do about it.
func (g *Gate) told(why grant.Reason) string {
	switch why {
	case grant.Superseded:
		return fmt.Sprintf("another process runs with owner %s; give each its own --owner, or restart this one", g.cfg.Owner)
	case grant.Fenced:
		return "an operator fenced it; restart it when it may serve again"
	}
	return why.String()
}

// Drain stops asking for grants and goes on deciding, from what is held and by
// Checks, until ctx ends or nobody has asked for a second: a gateway is often
// asked for a while after it was told to go. Then it
// closes every wallet and tells the authority, which need not wait for the units
// to expire, and Run ends. An error says that the authority was not reached;
// nothing is held here in any case.
func (g *Gate) Drain(ctx context.Context) error {
	g.asked.Store(int64(g.guard.now().Mono))
	g.draining.Store(true)
	g.visit(func(e *entry, now agent.Reading) { e.tenant.Drain(now, &e.fx) })
	t := time.NewTicker(guardEvery / 2)
	defer t.Stop()
	before := g.held()
	for more := true; more; {
		select {
		case <-ctx.Done():
			more = false
		case <-t.C:
			now := g.guard.now().Mono
			if held := g.held(); held != before { // Take leaves no other trace
				before = held
				g.asked.Store(int64(now))
			}
			more = now.Sub(grant.Instant(g.asked.Load())) < drainQuiet
		}
	}
	// From here on nothing is admitted: a Check's ALLOW that comes after the
	// discard would be spent by nobody.
	g.state.Store(closed)
	g.visit(func(e *entry, now agent.Reading) { e.tenant.Close(now) })
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.cfg.Authority.Silence)
	defer cancel()
	defer g.drained.Store(true)
	return g.link.Discard(last)
}

func (g *Gate) held() (sum grant.Units) {
	for _, e := range g.table.all() {
		e.mu.Lock()
		s := e.tenant.Stats()
		e.mu.Unlock()
		sum += s.Held
	}
	return sum
}

// shut ends the gate: wallets closed, waiters answered.
func (g *Gate) shut() {
	g.state.Store(closed)
	g.linkUp.Store(false)
	for _, e := range g.table.all() {
		e.mu.Lock()
		now := g.guard.now()
		e.tenant.Close(now)
		g.settle(e, now)
		for ticket, ch := range e.waiters {
			delete(e.waiters, ticket)
			ch <- agent.Decision{Outcome: agent.Undecided, Reason: grant.Unavailable}
		}
		e.mu.Unlock()
	}
}
