package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// caller is what this shell puts into authority.Call.Caller. receive must not
// block: it runs in a partition's goroutine.
type caller interface{ receive(authority.Reply) }

// partition is one Node and the goroutine that owns it.
type partition struct {
	id    grant.Partition
	store authority.Store
	clock clock
	push  func(*authority.PolicyPush)
	wake  chan struct{} // capacity 1: something waits

	mu      sync.Mutex
	node    *authority.Node
	closed  bool
	members []authority.Call // changes that wait for room in the inbox, in order
}

func newPartition(cfg authority.Config, id grant.Partition, store authority.Store, clock clock, push func(*authority.PolicyPush)) *partition {
	return &partition{id: id, store: store, clock: clock, push: push, wake: make(chan struct{}, 1), node: authority.NewNode(cfg, id)}
}

// offer queues calls and sends the refusal of those that find no room at once.
func (p *partition) offer(calls ...authority.Call) {
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
	p.signal()
	p.deliver(refused)
}

func (p *partition) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *partition) deliver(replies []authority.Reply) {
	for _, r := range replies {
		if r.Push != nil {
			p.push(r.Push)
			continue
		}
		if c, ok := r.Caller.(caller); ok {
			c.receive(r)
		}
	}
}

func (p *partition) load() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.node.Load(p.store, p.clock())
}

// errAbrupt, as the cause of the context's end, lets a partition stop where it
// is: it decides nothing any more.
var errAbrupt = errors.New("this process must not serve any longer")

// run drives the Node until ctx ends, then decides what is queued and steps
// down. It returns an error only when a commit failed: the process must end.
func (p *partition) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		next, more, err := p.step()
		if err != nil {
			return err
		}
		if more {
			continue
		}
		var due <-chan time.Time
		if next != grant.Never {
			timer.Reset(next.Sub(p.clock().Mono))
			due = timer.C
		}
		select {
		case <-ctx.Done():
		case <-p.wake:
		case <-due:
		}
	}
	if context.Cause(ctx) == errAbrupt {
		return nil
	}
	return p.stepDown()
}

// step takes one step of the Node; more says that calls still wait.
func (p *partition) step() (next grant.Instant, more bool, err error) {
	p.mu.Lock()
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
	now := p.clock()
	records := p.node.Step(now)
	if len(records) > 0 {
		p.mu.Unlock() // the next batch collects while this one is synced
		err = p.store.Commit(p.id, records)
		p.mu.Lock()
		p.node.Done(err)
	}
	replies := p.node.Replies()
	next = p.node.Wake(now)
	more = p.node.Waiting() > 0 || len(p.members) > 0
	p.closed = p.closed || err != nil
	p.mu.Unlock()
	p.deliver(replies)
	if err != nil {
		return 0, false, fmt.Errorf("partition %d: %w", p.id, err)
	}
	return next, more, nil
}

func (p *partition) stepDown() error {
	for more := true; more; {
		var err error
		if _, more, err = p.step(); err != nil {
			return err
		}
	}
	p.mu.Lock()
	records := p.node.Close(p.clock())
	p.closed = true
	p.mu.Unlock()
	var err error
	if len(records) > 0 {
		if err = p.store.Commit(p.id, records); err != nil {
			err = fmt.Errorf("partition %d: persist ledger time: %w", p.id, err)
		}
	}
	p.mu.Lock()
	replies := p.node.Replies()
	p.mu.Unlock()
	p.deliver(replies)
	return err
}

func (p *partition) stats() authority.Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.node.Stats()
}
