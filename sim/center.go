package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Center is the authority's process: a Node for each partition in use, driven
// as the daemon drives them.
type Center struct {
	w     *World
	rng   *rand.Rand
	Clock *Clock

	process uint64 // counts starts; odd while it runs
	paused  bool
	waiting []func() // what arrived while it was paused
	nodes   map[grant.Partition]*node
	order   []grant.Partition // in use, in order of first use
	streams map[grant.Incarnation]*stream
	tickets map[grant.Incarnation]*ticket
	// Overload makes every call fail as with a full inbox.
	Overload bool
}

// node is one partition's Node and the commit it waits for.
type node struct {
	*authority.Node
	p          grant.Partition
	committing bool
	ended      bool // the disk is through with it, though the process may not know
	landed     bool
	pumping    bool
	wake       grant.Instant // real instant of the alarm that is set
	offered    []authority.Call
	members    []authority.Call // that found the inbox full: they must not get lost
	step       step
}

// step is what a Node was asked in the step that is being committed.
type step struct {
	at               grant.Instant
	calls            []authority.Call
	granted, checked grant.Units // deducted in it
}

// callback is a Caller within the process.
type callback struct{ f func(authority.Reply) }

// ticket counts the partitions that have yet to answer one change of a member.
type ticket struct {
	left   int
	failed bool
	then   []func(ok bool)
}

func newCenter(w *World) *Center {
	c := &Center{w: w, rng: w.source("center"), Clock: newClock(w.now, 977*time.Second, 0, 0)}
	c.begin()
	return c
}

func (c *Center) begin() {
	c.process++
	c.paused, c.waiting = false, nil
	c.nodes = make(map[grant.Partition]*node)
	c.streams = make(map[grant.Incarnation]*stream)
	c.tickets = make(map[grant.Incarnation]*ticket)
}

// Alive reports whether the process runs.
func (c *Center) Alive() bool { return c.process%2 == 1 }

// do runs f in the process, if it is still the given one (0: whichever runs),
// now or when it goes on.
func (c *Center) do(process uint64, f func()) {
	switch {
	case !c.Alive() || process != 0 && process != c.process:
	case c.paused:
		c.waiting = append(c.waiting, f)
	default:
		f()
	}
}

// Crash ends the process at once. Commits under way are decided by chance.
func (c *Center) Crash() {
	if !c.Alive() {
		return
	}
	c.w.note("center crash")
	for _, p := range c.order {
		c.drop(c.nodes[p])
	}
	c.process++
	for _, g := range c.w.gateways {
		if s := g.stream; s != nil {
			s.cut()
		}
	}
	c.w.Registry.orphan()
	c.nodes, c.streams = nil, nil
	c.paused, c.waiting = false, nil
	c.Clock.Wake(c.w.now)
}

// StepDown ends the process in order: every Node hands its partition over. The
// commits of the last records fail now and then, and what the Nodes let go is
// sent all the same. A commit under way is decided by chance.
func (c *Center) StepDown() {
	if !c.Alive() || c.paused {
		return
	}
	for _, p := range c.order {
		n := c.nodes[p]
		if n.committing {
			continue
		}
		records := n.Close(c.Clock.Authority(c.w.now))
		err := c.w.Disk.Commit(p, records)
		if err != nil {
			c.w.note("partition %d stepped down without its last records", p)
		}
		c.release(n, step{at: c.w.now})
	}
	c.Crash()
}

// drop is the end of a Node's memory: what was being committed has landed or not.
func (c *Center) drop(n *node) {
	if n != nil && n.committing {
		if !n.ended {
			n.landed = c.w.Disk.crash(n.p)
		}
		c.w.Judge.unheard(n.p, n.step, n.landed)
		n.committing = false
	}
}

// Start runs a new process on the same disk.
func (c *Center) Start() {
	if c.Alive() {
		return
	}
	c.w.note("center start")
	c.begin()
	for _, p := range c.order {
		c.load(p)
	}
}

// Pause stops the process, as SIGSTOP does, or with the whole machine asleep.
func (c *Center) Pause(asleep bool) {
	if c.paused || !c.Alive() {
		return
	}
	c.paused = true
	if asleep {
		c.Clock.Sleep(c.w.now)
	}
}

// Resume lets the process go on.
func (c *Center) Resume() {
	c.Clock.Wake(c.w.now)
	if !c.paused {
		return
	}
	c.paused = false
	for len(c.waiting) > 0 && !c.paused {
		f := c.waiting[0]
		c.waiting = c.waiting[1:]
		f()
	}
	for _, p := range c.order {
		c.poke(c.nodes[p])
	}
}

// node returns the Node of a partition, a new one if need be.
func (c *Center) node(p grant.Partition) *node {
	if c.nodes[p] == nil {
		c.order = append(c.order, p)
		c.load(p)
	}
	return c.nodes[p]
}

// load makes a Node and reads its partition; then it is told of every member
// that is not gone, and the Judge looks at what it knows.
func (c *Center) load(p grant.Partition) {
	n := &node{Node: authority.NewNode(c.w.cfg.Authority, p), p: p, wake: grant.Never}
	c.nodes[p] = n
	if err := n.Load(c.w.Disk, c.Clock.Authority(c.w.now)); err != nil {
		c.w.Judge.failf("load: %w", err)
		return
	}
	for _, m := range c.w.Registry.order {
		ev := m.Member
		c.offer(n, authority.Call{Member: &ev})
	}
	c.w.Judge.loaded(n)
}

// Call asks the Node of a tenant's partition; f hears the reply, or Unavailable
// if the process does not run.
func (c *Center) Call(p grant.Partition, call authority.Call, f func(authority.Reply)) {
	if !c.Alive() {
		return
	}
	call.Caller = &callback{f}
	c.do(c.process, func() { c.offer(c.node(p), call) })
}

func (c *Center) offer(n *node, call authority.Call) {
	if len(n.members) > 0 && call.Member != nil {
		n.members = append(n.members, call)
		return
	}
	if c.Overload && call.Member == nil && call.Put == nil && call.Get == nil {
		c.route(n, overloaded(call))
		return
	}
	refusal, ok := n.Offer(call)
	switch {
	case ok:
		n.offered = append(n.offered, call)
	case call.Member != nil:
		n.members = append(n.members, call)
	default:
		c.route(n, refusal)
	}
	c.poke(n)
}

// overloaded is the answer of a Node whose inbox is full.
func overloaded(call authority.Call) authority.Reply {
	full := authority.NewNode(authority.Config{}, 0)
	refusal, _ := full.Offer(call)
	return refusal
}

// poke lets the Node step soon: after everything else of this instant.
func (c *Center) poke(n *node) {
	if n == nil || n.pumping {
		return
	}
	n.pumping = true
	process := c.process
	c.w.After(0, func() {
		n.pumping = false
		c.do(process, func() { c.pump(n) })
	})
}

// pump steps the Node if no commit is under way.
func (c *Center) pump(n *node) {
	if n.committing || c.nodes[n.p] != n {
		return
	}
	for len(n.members) > 0 {
		if _, ok := n.Offer(n.members[0]); !ok {
			break
		}
		n.members = n.members[1:]
	}
	now := c.Clock.Authority(c.w.now)
	before := n.Stats()
	records := n.Step(now)
	after := n.Stats()
	n.step = step{at: c.w.now, granted: after.Granted - before.Granted, checked: after.Checked - before.Checked}
	// Which of the offered were taken depends on turns: take all for asked that
	// were not answered.
	n.step.calls = n.offered
	if n.Waiting() == 0 {
		n.offered = nil
	}
	if len(records) == 0 {
		c.release(n, n.step)
		c.alarm(n)
		return
	}
	if early := n.Replies(); len(early) > 0 {
		c.w.Judge.failf("partition %d: %d replies before the records of their step were durable", n.p, len(early))
	}
	n.committing, n.ended = true, false
	process := c.process
	c.w.Disk.begin(n.p, records, func(err error, landed bool) {
		n.ended, n.landed = true, landed
		c.do(process, func() { c.committed(n, err) })
	})
}

func (c *Center) committed(n *node, err error) {
	n.committing = false
	if err != nil {
		c.w.Judge.unheard(n.p, n.step, n.landed)
	}
	n.Done(err)
	if err == nil {
		c.release(n, n.step)
		c.alarm(n)
		return
	}
	c.w.note("partition %d commit failed", n.p)
	c.release(n, step{at: n.step.at})
	if c.w.cfg.CommitEndsProcess {
		c.Crash()
		c.w.After(50*time.Millisecond+time.Duration(c.rng.Int64N(int64(500*time.Millisecond))), c.Start)
		return
	}
	left := n.members
	c.load(n.p)
	for _, m := range left {
		c.offer(c.nodes[n.p], m)
	}
}

// release sends what the Node lets go.
func (c *Center) release(n *node, s step) {
	replies := n.Replies()
	c.w.Judge.released(n.p, s, replies)
	if len(n.offered) > 0 {
		answered := make(map[authority.Caller]bool)
		for _, r := range replies {
			if r.Caller != nil {
				answered[r.Caller] = true
			}
		}
		attempts := make(map[grant.Attempt]bool)
		for _, r := range replies {
			if r.Check != nil {
				attempts[r.Check.Attempt] = true
			}
		}
		n.offered = slices.DeleteFunc(slices.Clone(n.offered), func(call authority.Call) bool {
			switch {
			case call.Check != nil:
				return attempts[call.Check.Attempt]
			case call.Grant != nil, call.Member != nil:
				return true // nothing is read from them
			}
			return answered[call.Caller]
		})
	}
	for _, r := range replies {
		c.route(n, r)
	}
}

func (c *Center) route(n *node, r authority.Reply) {
	switch to := r.Caller.(type) {
	case *callback:
		to.f(r)
	case *ticket:
		to.left--
		to.failed = to.failed || r.Member.Reason != grant.None
		if to.left == 0 {
			for _, f := range to.then {
				f(!to.failed)
			}
			to.then = nil
		}
	case *stream:
		g := to.gateway
		switch {
		case r.Grant != nil:
			a := *r.Grant
			to.send(toGateway, func() { g.granted(to, a) })
		case r.Check != nil:
			a := *r.Check
			to.send(toGateway, func() { g.checked(to, a) })
		}
	case nil:
		if r.Push == nil {
			return
		}
		if s := c.streams[r.Push.Incarnation]; s != nil {
			v := r.Push.VersionedPolicy
			s.send(toGateway, func() { s.gateway.pushed(v) })
		}
	default:
		panic(fmt.Sprintf("sim: reply to a %T", to))
	}
}

// alarm sets the Node's next wake-up.
func (c *Center) alarm(n *node) {
	if n.Waiting() > 0 {
		c.poke(n)
		return
	}
	at := c.Clock.When(n.Wake(c.Clock.Authority(c.w.now)))
	if at >= n.wake && n.wake > c.w.now {
		return // an earlier alarm is set: it will look again
	}
	n.wake = at
	process := c.process
	c.w.At(at, func() {
		if c.nodes[n.p] == n && n.wake == at {
			n.wake = grant.Never
			c.do(process, func() { c.pump(n) })
		}
	})
}

// changed hands a change of an incarnation to all partitions and its stream.
func (c *Center) changed(m authority.Member) {
	t := &ticket{left: len(c.order)}
	if t.left > 0 {
		c.tickets[m.Incarnation] = t
	}
	for _, p := range c.order {
		ev := m
		c.offer(c.nodes[p], authority.Call{Caller: t, Member: &ev})
	}
	if s := c.streams[m.Incarnation]; s != nil && m.State.Final() {
		c.fate(s, m.State)
	}
}

func (c *Center) fate(s *stream, state authority.MemberState) {
	why := map[authority.MemberState]grant.Reason{
		authority.Superseded: grant.Superseded, authority.Discarded: grant.Discarded, authority.Fenced: grant.Fenced,
	}[state]
	s.sure(toGateway, func() { s.gateway.fated(why) })
}

// open is the first frame of a stream: the incarnation is registered, and
// welcomed when every partition knows it.
func (c *Center) open(s *stream) {
	process := c.process
	c.w.After(c.w.Registry.delay(), func() {
		if s.broken || process != c.process {
			return
		}
		state := c.w.Registry.register(s.inc, s.owner)
		// The change, if any, is on its way to the center and arrives first.
		c.w.At(max(c.w.Registry.told, c.w.now), func() { c.do(process, func() { c.welcome(s, state) }) })
	})
}

func (c *Center) welcome(s *stream, state authority.MemberState) {
	if s.broken {
		return
	}
	finish := func(ok bool) {
		if s.broken {
			return
		}
		if !ok {
			s.cut()
			return
		}
		if old := c.streams[s.inc]; old != nil && old != s {
			old.cut()
		}
		c.streams[s.inc] = s
		s.open = true
		c.w.Registry.attach(s.inc)
		s.sure(toGateway, func() { s.gateway.welcome(s) })
		if state.Final() {
			c.fate(s, state)
		}
	}
	if t := c.tickets[s.inc]; t != nil && t.left > 0 {
		t.then = append(t.then, finish)
		return
	}
	finish(true)
}

func (c *Center) detach(s *stream) {
	if c.streams[s.inc] == s {
		delete(c.streams, s.inc)
	}
	if s.open {
		s.open = false
		c.w.Registry.detach(s.inc)
	}
}

// grant and check are entries of a batch that arrived on a stream.
func (c *Center) grant(s *stream, r grant.GrantRequest) {
	c.offer(c.node(grant.PartitionOf(r.Tenant)), authority.Call{Caller: s, Grant: &r})
}

func (c *Center) check(s *stream, r grant.CheckRequest) {
	call := authority.Call{Caller: s, Check: &r}
	call.Deadline = max(1, c.Clock.Mono(c.w.now).Add(r.Budget))
	c.offer(c.node(grant.PartitionOf(r.Tenant)), call)
}

// Put asks for a policy until it hears a definite answer, and then calls done,
// which may be nil.
func (c *Center) Put(t grant.TenantID, p *grant.Policy, done func(authority.PutResult)) {
	again := func() { c.w.After(100*time.Millisecond, func() { c.Put(t, p, done) }) }
	if !c.Alive() {
		again()
		return
	}
	answered := false
	process := c.process
	c.Call(grant.PartitionOf(t), authority.Call{Put: &authority.PutPolicy{Tenant: t, Policy: p, AnyVersion: true}}, func(r authority.Reply) {
		answered = true
		switch {
		case r.Put.Reason == grant.Unavailable || r.Put.Reason == grant.Overloaded:
			again()
		case done != nil:
			done(*r.Put)
		}
	})
	c.w.After(10*time.Second, func() { // it may have died with the process
		if !answered && process != c.process {
			answered = true
			c.Put(t, p, done)
		}
	})
}

// Inspect is the state of one tenant as the Node tells it, now and without
// waiting for durability: for tests.
func (c *Center) Inspect(t grant.TenantID, f func(*authority.TenantState)) {
	c.Call(grant.PartitionOf(t), authority.Call{Get: &authority.GetTenant{Tenant: t}}, func(r authority.Reply) { f(r.Tenant) })
}
