package sim

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

const (
	guardEvery = 100 * time.Millisecond
	guardLife  = 300 * time.Millisecond
	redialMost = time.Second
)

// Gateway is one gateway's place: a name, a machine with clocks, and the process
// of an agent on it, which may die and be started again as a new incarnation.
type Gateway struct {
	w     *World
	rng   *rand.Rand
	Owner grant.Owner
	Clock *Clock

	process uint64 // counts starts; odd while it runs
	paused  bool
	pauses  uint64
	waiting []func()

	inc      grant.Incarnation
	seq      uint64
	ticket   uint64
	tenants  map[grant.TenantID]*entry
	order    []*entry
	stream   *stream
	up       bool
	redials  int
	fate     grant.Reason
	draining bool
	closed   bool
	guard    guard
}

// entry is one tenant of a gateway, with what the world knows about it by itself.
type entry struct {
	*agent.Tenant
	id      grant.TenantID
	fx      agent.Effects
	waiters map[uint64]waiter
	wake    grant.Instant // agent's MONOTONIC, of the alarm that is set
	alarm   uint64

	accounts [2]wallet // ordinary, emergency
}

// waiter is a request that the agent has not decided.
type waiter struct {
	deadline grant.Instant // agent's MONOTONIC
	pauses   uint64        // of the gateway when it began
	done     func(agent.Decision)
}

// wallet is what the world saw of one account of one incarnation.
type wallet struct {
	sent     grant.GrantID // newest request
	first    agent.Reading // when that was first sent
	open     bool
	spent    grant.Units
	credited grant.Units
	expiry   grant.Instant // of what is held, by the newest credit
	offset   grant.Instant
}

type guard struct {
	offset    grant.Instant
	boot, raw time.Duration
	fresh     grant.Instant
}

// AddGateway starts an agent on a machine of its own whose MONOTONIC has the rate
// error, in parts per billion.
func (w *World) AddGateway(owner grant.Owner, ppb int64) *Gateway {
	rng := w.source(fmt.Sprintf("gateway %d %s", len(w.gateways), owner))
	g := &Gateway{w: w, rng: rng, Owner: owner}
	g.Clock = newClock(w.now, time.Hour+time.Duration(rng.Int64N(int64(1000*time.Hour))), ppb, ppb)
	w.gateways = append(w.gateways, g)
	g.Start()
	return g
}

// Alive reports whether the process runs, or is paused.
func (g *Gateway) Alive() bool { return g.process%2 == 1 }

// Up reports whether the link to the authority is up.
func (g *Gateway) Up() bool { return g.Alive() && g.up }

// Incarnation is that of the process that runs, or ran last.
func (g *Gateway) Incarnation() grant.Incarnation { return g.inc }

// Start runs a new process with a fresh incarnation.
func (g *Gateway) Start() {
	if g.Alive() {
		return
	}
	g.process++
	for i := range g.inc {
		g.inc[i] = byte(g.rng.Uint32())
	}
	g.seq, g.ticket, g.redials = 0, 0, 0
	g.paused, g.up, g.draining, g.closed, g.fate = false, false, false, false, grant.None
	g.waiting, g.order, g.stream = nil, nil, nil
	g.tenants = make(map[grant.TenantID]*entry)
	g.guard = guard{}
	g.w.note("%s start %v", g.Owner, g.inc)
	g.look()
	g.watch()
	g.dial()
}

// Kill ends the process at once: what it held is gone with it.
func (g *Gateway) Kill() {
	if !g.Alive() {
		return
	}
	g.w.note("%s kill", g.Owner)
	g.process++
	for _, e := range g.order {
		g.w.Judge.died(e)
	}
	if s := g.stream; s != nil {
		s.cut()
	}
	g.tenants, g.order = nil, nil
	g.paused, g.waiting = false, nil
	g.Clock.Wake(g.w.now)
}

// Pause stops the process. asleep says that the machine sleeps: MONOTONIC stands
// still too. Requests that come meanwhile find nobody.
func (g *Gateway) Pause(asleep bool) {
	if g.paused || !g.Alive() {
		return
	}
	g.w.note("%s pause %v", g.Owner, asleep)
	g.paused = true
	g.pauses++
	if asleep {
		g.Clock.Sleep(g.w.now)
	}
}

// Resume lets the process go on. What arrived meanwhile comes first.
func (g *Gateway) Resume() {
	g.Clock.Wake(g.w.now)
	if !g.paused {
		return
	}
	g.w.note("%s resume", g.Owner)
	g.paused = false
	for len(g.waiting) > 0 && !g.paused {
		f := g.waiting[0]
		g.waiting = g.waiting[1:]
		f()
	}
	g.Retime()
}

// Nap is a pause of d and the Resume after it.
func (g *Gateway) Nap(d time.Duration, asleep bool) {
	g.Pause(asleep)
	g.w.After(d, g.Resume)
}

// Retime sets all alarms anew, after the clock's rate changed.
func (g *Gateway) Retime() {
	for _, e := range g.order {
		e.wake = 0
		g.setAlarm(e)
	}
}

// do runs f in the given process, now or when it goes on.
func (g *Gateway) do(process uint64, f func()) {
	switch {
	case process != g.process:
	case g.paused:
		g.waiting = append(g.waiting, f)
	default:
		f()
	}
}

func (g *Gateway) now() agent.Reading { return g.Clock.Agent(g.w.now) }

// dial opens a stream. A center that does not run refuses; one that does not
// answer is given up.
func (g *Gateway) dial() {
	s := &stream{w: g.w, rng: g.rng, gateway: g, process: g.process, inc: g.inc, owner: g.Owner, center: g.w.Center.process}
	g.stream = s
	if !g.w.Center.Alive() {
		g.w.After(s.latency(), s.cut)
		return
	}
	g.w.After(s.latency(), func() { g.w.Center.do(s.center, func() { g.w.Center.open(s) }) })
	g.w.After(2*time.Second, func() {
		if !s.open {
			s.cut()
		}
	})
}

// welcome is the first answer on a stream.
func (g *Gateway) welcome(s *stream) {
	if g.stream != s || s.broken {
		return
	}
	g.up, g.redials = true, 0
	s.heard = g.now().Mono
	g.w.note("%s up", g.Owner)
	s.wear()
	for _, e := range g.order {
		now := g.now()
		e.Link(now, true, &e.fx)
		g.settle(e, now)
	}
}

// down is the end of a stream.
func (g *Gateway) down(s *stream) {
	if g.stream != s || g.closed {
		return
	}
	wasUp := g.up
	g.up, g.stream = false, nil
	if wasUp {
		g.w.note("%s down", g.Owner)
		for _, e := range g.order {
			now := g.now()
			e.Link(now, false, &e.fx)
			g.settle(e, now)
		}
	}
	ceiling := min(redialMost, 50*time.Millisecond<<min(g.redials, 8))
	g.redials++
	process := g.process
	g.w.After(time.Duration(g.rng.Int64N(int64(ceiling))), func() { g.do(process, g.dial) })
}

// watch is the ticker of the clock guard, and gives silent streams up.
func (g *Gateway) watch() {
	process := g.process
	g.w.At(g.Clock.When(g.now().Mono.Add(guardEvery)), func() {
		g.do(process, func() {
			g.look()
			silence := g.w.cfg.Net.Silence
			if silence == 0 {
				silence = defaultSilence
			}
			if s := g.stream; s != nil && g.up && s.unheard > 0 && g.now().Mono.Sub(s.heard) > silence {
				s.cut()
			}
			g.watch()
		})
	})
}

// look compares the clocks of the machine, as the gate's guard does.
func (g *Gateway) look() {
	now := g.now()
	boot, raw := g.Clock.lag(g.w.now)
	tolerance := g.w.cfg.Agent.Tolerance
	apart := func(a, b time.Duration) bool { return a-b > tolerance || b-a > tolerance }
	offset := now.Wall - now.Mono
	moved := g.guard.fresh != 0 && (apart(time.Duration(offset), time.Duration(g.guard.offset)) || apart(boot, g.guard.boot) || apart(raw, g.guard.raw))
	first := g.guard.fresh == 0
	g.guard.offset = offset
	if first || moved {
		g.guard.boot, g.guard.raw = boot, raw
	}
	if moved {
		for _, e := range g.order {
			e.Distrust(now)
			g.settle(e, now)
		}
	}
	g.guard.fresh = now.Mono.Add(guardLife)
}

// Request is one request of a client. done hears the decision, now or later;
// never if the process dies, is paused, or was not running.
func (g *Gateway) Request(id grant.TenantID, class grant.RouteClass, count grant.Units, budget time.Duration, done func(agent.Decision)) {
	if !g.Alive() || g.paused {
		return
	}
	now := g.now()
	e := g.tenants[id]
	if e != nil && now.Mono < g.guard.fresh {
		if d, ok := e.Take(now, class, count); ok {
			g.decided(e, d, nil, done)
			if e.Low() {
				e.Tick(now, &e.fx)
				g.settle(e, now)
			}
			return
		}
	}
	if now.Mono >= g.guard.fresh {
		g.look()
	}
	if g.closed {
		g.w.Judge.answered(g, id, agent.Decision{Outcome: agent.Undecided, Reason: grant.Unavailable})
		return
	}
	if e == nil {
		e = g.entry(id)
	}
	g.ticket++
	ticket := g.ticket
	deadline := now.Mono.Add(min(budget, g.w.cfg.Agent.Deadline))
	d := e.Ask(now, agent.Ask{Ticket: ticket, Class: class, Count: count, Budget: budget}, &e.fx)
	if d.Outcome == agent.Waiting {
		e.waiters[ticket] = waiter{deadline, g.pauses, done}
		g.w.Judge.waits(id)
	} else {
		g.decided(e, d, nil, done)
	}
	g.settle(e, now)
}

// GiveUp ends the wait of the newest request that waits, as a client that hangs up does.
func (g *Gateway) GiveUp(id grant.TenantID) {
	e := g.tenants[id]
	if e == nil || g.paused || len(e.waiters) == 0 {
		return
	}
	var newest uint64
	for t := range e.waiters {
		newest = max(newest, t)
	}
	now := g.now()
	d, ok := e.GiveUp(now, newest, &e.fx)
	if ok {
		w := e.waiters[newest]
		delete(e.waiters, newest)
		g.decided(e, d, nil, w.done)
	}
	g.settle(e, now)
}

func (g *Gateway) entry(id grant.TenantID) *entry {
	cfg := g.w.cfg.Agent
	cfg.NextSeq = func() uint64 { g.seq++; return g.seq }
	cfg.Rand = g.rng.Int64N
	e := &entry{Tenant: agent.NewTenant(cfg, id, g.inc), id: id, waiters: make(map[uint64]waiter), wake: grant.Never}
	g.tenants[id] = e
	g.order = append(g.order, e)
	now := g.now()
	e.Link(now, g.up, &e.fx)
	if g.fate != grant.None {
		e.Fate(now, g.fate, &e.fx)
	}
	if g.draining {
		e.Drain(now, &e.fx)
	}
	return e
}

// decided reports a decision to the Judge and the client. attempt is the Check
// that decided it, if one did.
func (g *Gateway) decided(e *entry, d agent.Decision, attempt *grant.Attempt, done func(agent.Decision)) {
	g.w.Judge.decided(g, e, d, attempt)
	if done != nil {
		done(d)
	}
}

// settle carries out the effects of a tenant. What the link does not take is
// answered at once, at most three times over.
func (g *Gateway) settle(e *entry, now agent.Reading) { g.settleFor(e, now, nil) }

func (g *Gateway) settleFor(e *entry, now agent.Reading, attempt *grant.Attempt) {
	for range 3 {
		if len(e.fx.Grants)+len(e.fx.Checks)+len(e.fx.Resolved) == 0 {
			break
		}
		cur := e.fx
		e.fx = agent.Effects{}
		for _, r := range cur.Resolved {
			w, ok := e.waiters[r.Ticket]
			if !ok {
				g.w.Judge.failf("%s: ticket %d of %q is resolved twice", g.Owner, r.Ticket, e.id)
				continue
			}
			delete(e.waiters, r.Ticket)
			g.w.Judge.resolved(g, e, w, now, r.Decision)
			g.decided(e, r.Decision, attempt, w.done)
		}
		for _, r := range cur.Grants {
			if g.up {
				g.sendGrant(e, r, now)
				continue
			}
			e.Answer(now, grant.GrantAnswer{Tenant: e.id, Incarnation: g.inc, Emergency: r.Emergency,
				ID: r.ID, Result: grant.Busy, Reason: grant.Unavailable}, &e.fx)
		}
		for _, r := range cur.Checks {
			if g.up {
				g.sendCheck(r)
				continue
			}
			e.Checked(now, grant.CheckAnswer{Tenant: e.id, Attempt: r.Attempt, Verdict: grant.Undecided, Reason: grant.Unavailable}, &e.fx)
		}
		attempt = nil
	}
	g.setAlarm(e)
}

func (g *Gateway) sendGrant(e *entry, r grant.GrantRequest, now agent.Reading) {
	if err := g.w.Judge.asked(g, e, &r, now); err != nil {
		g.w.Judge.fail(err)
	}
	s := g.stream
	g.expects(s)
	s.send(toCenter, func() { g.w.Center.grant(s, r) })
}

func (g *Gateway) sendCheck(r grant.CheckRequest) {
	s := g.stream
	g.expects(s)
	s.send(toCenter, func() { g.w.Center.check(s, r) })
}

// expects counts a request on the stream; silence begins with the first that is
// not answered.
func (g *Gateway) expects(s *stream) {
	if s.unheard == 0 {
		s.heard = g.now().Mono
	}
	s.unheard++
}

func (g *Gateway) setAlarm(e *entry) {
	at := e.Wake()
	if at == e.wake {
		return
	}
	e.wake = at
	e.alarm++
	if at == grant.Never {
		return
	}
	alarm, process := e.alarm, g.process
	g.w.At(g.Clock.When(at), func() { g.ring(e, alarm, process) })
}

func (g *Gateway) ring(e *entry, alarm, process uint64) {
	g.do(process, func() {
		now := g.now()
		switch {
		case e.alarm != alarm:
		case now.Mono < e.wake: // the machine slept
			g.w.At(g.Clock.When(e.wake), func() { g.ring(e, alarm, process) })
		default:
			e.wake = 0
			e.Tick(now, &e.fx)
			g.settle(e, now)
		}
	})
}

// of runs f for a tenant that has state here.
func (g *Gateway) of(s *stream, id grant.TenantID, attempt *grant.Attempt, f func(*entry, agent.Reading)) {
	now := g.now()
	if s != nil {
		s.unheard, s.heard = max(0, s.unheard-1), now.Mono
	}
	e := g.tenants[id]
	if e == nil {
		return
	}
	f(e, now)
	g.settleFor(e, now, attempt)
}

func (g *Gateway) granted(s *stream, a grant.GrantAnswer) {
	g.of(s, a.Tenant, nil, func(e *entry, now agent.Reading) {
		before := e.Stats()
		e.Answer(now, a, &e.fx)
		g.w.Judge.credited(g, e, &a, before, e.Stats(), now)
	})
	if a.Reason == grant.UnknownSession && g.stream != nil {
		g.stream.cut() // the authority forgot us: open a session again
	}
}

func (g *Gateway) checked(s *stream, a grant.CheckAnswer) {
	g.of(s, a.Tenant, &a.Attempt, func(e *entry, now agent.Reading) { e.Checked(now, a, &e.fx) })
}

func (g *Gateway) pushed(v authority.VersionedPolicy) {
	g.of(nil, v.Tenant, nil, func(e *entry, now agent.Reading) { e.Pushed(now, v.Version, v.Policy, v.Deleted, &e.fx) })
}

func (g *Gateway) fated(why grant.Reason) {
	g.w.note("%s fate %v", g.Owner, why)
	g.fate = why
	for _, e := range g.order {
		now := g.now()
		e.Fate(now, why, &e.fx)
		g.settle(e, now)
	}
}

// Drain stops asking for grants; after d the wallets are closed, the incarnation
// is discarded and the process ends.
func (g *Gateway) Drain(d time.Duration) {
	if !g.Alive() || g.paused {
		return
	}
	g.w.note("%s drain", g.Owner)
	g.draining = true
	for _, e := range g.order {
		now := g.now()
		e.Drain(now, &e.fx)
		g.settle(e, now)
	}
	process := g.process
	g.w.After(d, func() { g.do(process, g.discard) })
}

func (g *Gateway) discard() {
	g.closed = true
	for _, e := range g.order {
		now := g.now()
		e.Close(now)
		e.Tick(now, &e.fx)
		g.settle(e, now)
	}
	inc := g.inc
	if s := g.stream; g.up {
		s.sure(toCenter, func() { g.w.Registry.discard(inc) })
	}
	process := g.process
	g.w.After(100*time.Millisecond, func() { g.do(process, g.Kill) })
}
