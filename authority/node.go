package authority

import (
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Node drives the Ledger of one partition: it queues calls, steps many of them
// at once, hands out the records of the step, and releases the replies when
// those are durable. The daemon and the simulator use it unchanged.
//
// A step is taken only while no commit is under way; what arrives meanwhile is
// collected for the next one. So every decision rests on durable state and on
// its own step alone, and no reply of any kind can overtake a record.
//
// Not safe for concurrent use.
type Node struct {
	cfg       Config
	partition grant.Partition
	ledger    *Ledger // nil: not loaded, or dropped after a failed commit
	inbox     inbox

	base    grant.Instant // ledger time at the load
	loaded  Reading       // clocks at the load
	pending []Record      // being committed
	held    []Reply       // released by Done
	calls   []Call        // of the step being committed, to be told of its failure
	ready   []Reply
}

// NewNode makes a Node that must be loaded before it serves.
func NewNode(cfg Config, p grant.Partition) *Node {
	return &Node{cfg: cfg, partition: p, inbox: inbox{limit: cfg.MaxInbox, queues: make(map[grant.TenantID]*queue)}}
}

// Load reads the partition. Ledger time continues from the largest instant in
// the store and advances from here by this machine's elapsed time: the base is
// taken anew at every load, so the time in which nobody led does not count.
func (n *Node) Load(s Store, r Reading) error {
	l, err := load(n.cfg, n.partition, s)
	if err != nil {
		return err
	}
	n.ledger, n.base, n.loaded = l, l.now, r
	return nil
}

// Loaded reports whether the Node serves.
func (n *Node) Loaded() bool { return n.ledger != nil }

// now is ledger time at a reading: the smaller of what the two clocks counted.
func (n *Node) now(r Reading) grant.Instant {
	elapsed := min(r.Mono-n.loaded.Mono, r.Raw-n.loaded.Raw)
	return n.base + max(elapsed, 0)
}

// Offer queues a call. When the inbox is full, or the tenant has its fair share
// in it, ok is false and the refusal is to be sent at once: it promises nothing.
func (n *Node) Offer(c Call) (refusal Reply, ok bool) {
	if n.inbox.offer(c) {
		return Reply{}, true
	}
	return undecided(c, grant.Overloaded), false
}

// Waiting is how many calls wait for a step.
func (n *Node) Waiting() int { return n.inbox.size }

// Step decides up to MaxBatch waiting calls and whatever is due. The records
// must be committed, all or none, and Done called, before the next Step. Without
// records the replies are ready at once.
func (n *Node) Step(r Reading) []Record {
	if n.pending != nil {
		panic("authority: Step while a commit is under way")
	}
	if n.ledger == nil {
		n.refuseInbox()
		return nil
	}
	l := n.ledger
	l.begin(n.now(r))
	for range n.cfg.MaxBatch {
		c, ok := n.inbox.take()
		if !ok {
			break
		}
		n.calls = append(n.calls, c)
		if c.Deadline != 0 && r.Mono > c.Deadline && c.Member == nil {
			l.replies = append(l.replies, undecided(c, grant.Deadline))
			continue
		}
		l.step(c)
	}
	return n.hold(l.seal())
}

// hold keeps the replies of a step until its records are durable.
func (n *Node) hold(records []Record) []Record {
	n.pending = records
	n.held, n.ledger.replies = append(n.held, n.ledger.replies...), n.ledger.replies[:0]
	if len(records) == 0 {
		n.pending = nil
		n.release()
	}
	return records
}

func (n *Node) release() {
	n.ready = append(n.ready, n.held...)
	clear(n.held)
	clear(n.calls)
	n.held, n.calls = n.held[:0], n.calls[:0]
}

// Done says how the commit of the last step ended. After an error, or when the
// outcome is unknown, the memory is dropped and everybody who waits, parked
// requests included, is told to try again; the Node serves after the next Load.
func (n *Node) Done(err error) {
	if n.pending == nil {
		panic("authority: Done without a commit under way")
	}
	n.pending = nil
	if err == nil {
		n.release()
		return
	}
	for _, c := range n.calls {
		if c.Caller != nil {
			n.ready = append(n.ready, undecided(c, grant.Unavailable))
		}
	}
	// Whoever was parked before this step, served by it or not, hears the same.
	n.ledger.replies = n.ledger.replies[:0]
	n.ledger.refuseParked(grant.Unavailable)
	for _, r := range append(n.held, n.ledger.replies...) {
		if r.Grant == nil || n.told(r) {
			continue
		}
		g := r.Grant
		n.ready = append(n.ready, Reply{Caller: r.Caller, Grant: &grant.GrantAnswer{Tenant: g.Tenant, Incarnation: g.Incarnation,
			Emergency: g.Emergency, ID: g.ID, Result: grant.Busy, Reason: grant.Unavailable}})
	}
	n.ledger = nil
	clear(n.held)
	clear(n.calls)
	n.held, n.calls = n.held[:0], n.calls[:0]
	n.refuseInbox()
}

// told reports whether a reply answers a call of the failed step.
func (n *Node) told(r Reply) bool {
	for _, c := range n.calls {
		if c.Grant != nil && c.Caller == r.Caller && c.Grant.ID == r.Grant.ID && c.Grant.Tenant == r.Grant.Tenant &&
			c.Grant.Incarnation == r.Grant.Incarnation && c.Grant.Emergency == r.Grant.Emergency {
			return true
		}
	}
	return false
}

func (n *Node) refuseInbox() {
	for {
		c, ok := n.inbox.take()
		if !ok {
			return
		}
		if c.Caller != nil {
			n.ready = append(n.ready, undecided(c, grant.Unavailable))
		}
	}
}

// Replies drains what may be sent now, in order.
func (n *Node) Replies() []Reply {
	r := n.ready
	n.ready = nil
	return r
}

// Wake is when Step must be called at the latest, in Reading.Mono;
// grant.Never: no sooner than a call waits.
func (n *Node) Wake(r Reading) grant.Instant {
	if n.ledger == nil {
		return grant.Never
	}
	due := n.ledger.wake()
	if due == grant.Never {
		return due
	}
	return r.Mono.Add(max(due.Sub(n.now(r)), 0))
}

// Close ends the leadership: who is parked is told to try again, and the
// returned records, ledger time among them, are to be committed. Calls that
// still wait are refused. The Node serves after the next Load.
func (n *Node) Close(r Reading) []Record {
	if n.pending != nil {
		panic("authority: Close while a commit is under way")
	}
	if n.ledger == nil {
		n.refuseInbox()
		return nil
	}
	n.ledger.stepDown(n.now(r))
	records := n.ledger.seal()
	n.ready = append(n.ready, n.ledger.replies...)
	n.ledger = nil
	n.refuseInbox()
	return records
}

// Stats are counts since the load, and gauges of now.
func (n *Node) Stats() Stats {
	var s Stats
	if n.ledger != nil {
		s = n.ledger.snapshotStats()
	}
	s.Inbox = n.inbox.size
	return s
}

// Check tests the Ledger's invariants.
func (n *Node) Check() error {
	if n.ledger == nil {
		return nil
	}
	return n.ledger.Check()
}

// step decides one call.
func (l *Ledger) step(c Call) {
	switch {
	case c.Check != nil:
		l.check(c.Caller, c.Check)
	case c.Grant != nil:
		l.grant(c.Caller, c.Grant)
	case c.Put != nil:
		l.put(c.Caller, c.Put)
	case c.Get != nil:
		l.get(c.Caller, c.Get)
	case c.List != nil:
		l.list(c.Caller, c.List)
	case c.Member != nil:
		l.memberChanged(c.Caller, c.Member)
	}
}

// undecided answers a call about whose fate nothing is said.
func undecided(c Call, why grant.Reason) Reply {
	r := Reply{Caller: c.Caller}
	switch {
	case c.Check != nil:
		r.Check = &grant.CheckAnswer{Tenant: c.Check.Tenant, Attempt: c.Check.Attempt, Verdict: grant.Undecided, Reason: why}
		if why == grant.Overloaded {
			r.Check.RetryAfter = time.Second
		}
	case c.Grant != nil:
		q := c.Grant
		r.Grant = &grant.GrantAnswer{Tenant: q.Tenant, Incarnation: q.Incarnation, Emergency: q.Emergency, ID: q.ID, Result: grant.Busy, Reason: why}
	case c.Put != nil:
		r.Put = &PutResult{Tenant: c.Put.Tenant, Reason: why}
	case c.Get != nil:
		r.Tenant = &TenantState{VersionedPolicy: VersionedPolicy{Tenant: c.Get.Tenant}, Reason: why}
	case c.List != nil:
		r.List = &PolicyPage{Reason: why}
	case c.Member != nil:
		r.Member = &MemberResult{Incarnation: c.Member.Incarnation, State: c.Member.State, Reason: why}
	}
	return r
}
