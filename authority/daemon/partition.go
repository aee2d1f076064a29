package daemon

import (
	"sync"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// caller is what this shell puts into authority.Call.Caller. receive must not
// block: it runs in a drive's goroutine.
type caller interface{ receive(authority.Reply) }

// partition is one Node behind a lock: callers queue calls, the partition's
// drive steps it.
type partition struct {
	id    grant.Partition
	store authority.Store // to load from
	clock clock
	push  func(*authority.PolicyPush)

	drive *drive        // set before the first call
	bit   uint64        // of this partition in the drive's marks
	due   grant.Instant // the drive's: when the Node must be stepped at the latest

	mu      sync.Mutex
	node    *authority.Node
	closed  bool
	members []authority.Call // changes that wait for room in the inbox, in order
}

func newPartition(cfg authority.Config, id grant.Partition, store authority.Store, clock clock, push func(*authority.PolicyPush)) *partition {
	return &partition{id: id, store: store, clock: clock, push: push, node: authority.NewNode(cfg, id)}
}

// offer queues calls and sends the refusal of those that find no room at once.
func (p *partition) offer(calls ...authority.Call) {
	p.queue(calls...)
	p.drive.mark(p.bit)
}

// queue is offer for a caller that marks the partition itself.
func (p *partition) queue(calls ...authority.Call) {
	var refused []authority.Reply
	p.mu.Lock()
	for _, c := range calls {
		switch {
		case p.closed: // a Node without a Ledger answers "try again"
			p.node.Offer(c)
			p.node.Step(authority.Reading{})
			refused = append(refused, p.node.Replies()...)
		case c.Member != nil && len(p.members) > 0:
			p.members = append(p.members, c)
		default:
			r, ok := p.node.Offer(c)
			if ok {
				continue
			}
			if c.Member != nil { // a change must not get lost
				p.members = append(p.members, c)
				continue
			}
			refused = append(refused, r)
		}
	}
	p.mu.Unlock()
	for _, r := range refused {
		p.deliver(r)
		if s, ok := r.Caller.(*stream); ok {
			s.signal()
		}
	}
}

// deliver hands out one reply; a stream is to be signalled afterwards.
func (p *partition) deliver(r authority.Reply) {
	if r.Push != nil {
		p.push(r.Push)
		return
	}
	switch c := r.Caller.(type) {
	case *stream:
		c.put(r)
	case caller:
		c.receive(r)
	}
}

func (p *partition) load() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.node.Load(p.store, p.clock())
}

// step takes one step of the Node. Its records are to be committed, and
// committed called, before the next one.
func (p *partition) step(now authority.Reading) []authority.Record {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.members) > 0 {
		if _, ok := p.node.Offer(p.members[0]); !ok {
			break
		}
		p.members[0] = authority.Call{}
		p.members = p.members[1:]
	}
	if len(p.members) == 0 {
		p.members = nil
	}
	return p.node.Step(now)
}

// committed says how the commit of the last step ended.
func (p *partition) committed(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.node.Done(err)
	p.closed = p.closed || err != nil
}

// take appends the replies that may be sent, and notes when the Node is due
// and whether calls still wait.
func (p *partition) take(replies []authority.Reply, now authority.Reading) []authority.Reply {
	p.mu.Lock()
	defer p.mu.Unlock()
	replies = append(replies, p.node.Replies()...)
	p.due = p.node.Wake(now)
	if p.node.Waiting() > 0 || len(p.members) > 0 {
		p.drive.mark(p.bit)
	}
	return replies
}

// close ends the Node's leadership; its records are to be committed.
func (p *partition) close(now authority.Reading) []authority.Record {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	return p.node.Close(now)
}

func (p *partition) stats() authority.Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.node.Stats()
}
