package daemon

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// router hands changes of incarnations to all partitions and to their streams,
// and pushes of policies to the streams.
type router struct {
	log        *slog.Logger
	partitions []*partition

	mu      sync.Mutex
	tickets map[grant.Incarnation]*ticket // the newest change that not every partition has answered
	streams map[grant.Incarnation]*stream
	idle    chan struct{} // of drain; closed when no stream is left
}

func newRouter(log *slog.Logger) *router {
	return &router{log: log, tickets: make(map[grant.Incarnation]*ticket), streams: make(map[grant.Incarnation]*stream)}
}

// ticket counts the partitions that have yet to answer one change.
type ticket struct {
	router *router
	inc    grant.Incarnation
	done   chan struct{}

	mu     sync.Mutex
	left   int
	failed grant.Reason
}

func (t *ticket) receive(r authority.Reply) {
	t.mu.Lock()
	t.left--
	last := t.left == 0
	if r.Member == nil {
		t.failed = grant.Unavailable
	} else if r.Member.Reason != grant.None {
		t.failed = r.Member.Reason
	}
	t.mu.Unlock()
	if last {
		t.router.mu.Lock()
		if t.router.tickets[t.inc] == t {
			delete(t.router.tickets, t.inc)
		}
		t.router.mu.Unlock()
		close(t.done)
	}
}

// changed is the registry's callback: calls come in order, from one goroutine.
func (r *router) changed(m authority.Member) {
	r.log.Info("incarnation changed", "owner", m.Owner, "incarnation", m.Incarnation, "state", m.State)
	r.tell(m)
}

// tell hands one state to all partitions, and a final one to its stream.
func (r *router) tell(m authority.Member) {
	t := &ticket{router: r, inc: m.Incarnation, done: make(chan struct{}), left: len(r.partitions)}
	r.mu.Lock()
	r.tickets[m.Incarnation] = t
	s := r.streams[m.Incarnation]
	r.mu.Unlock()
	for _, p := range r.partitions {
		p.offer(authority.Call{Caller: t, Member: &m})
	}
	if s != nil && m.State.Final() {
		s.sendFate(fateOf(m.State))
	}
}

func fateOf(s authority.MemberState) grant.Reason {
	switch s {
	case authority.Superseded:
		return grant.Superseded
	case authority.Discarded:
		return grant.Discarded
	case authority.Fenced:
		return grant.Fenced
	}
	return grant.None
}

var errNotTold = errors.New("not every partition learned of the incarnation's change")

// settled waits until every partition has answered all that was handed out
// about the incarnation.
func (r *router) settled(ctx context.Context, i grant.Incarnation) error {
	r.mu.Lock()
	t := r.tickets[i]
	r.mu.Unlock()
	if t == nil {
		return nil
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.failed != grant.None {
		return errNotTold
	}
	return nil
}

// attach makes s the incarnation's stream and returns the one before it.
func (r *router) attach(s *stream) (before *stream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before = r.streams[s.inc]
	r.streams[s.inc] = s
	return before
}

func (r *router) detach(s *stream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.streams[s.inc] == s {
		delete(r.streams, s.inc)
		if r.idle != nil && len(r.streams) == 0 {
			close(r.idle)
			r.idle = nil
		}
	}
}

func (r *router) push(p *authority.PolicyPush) {
	r.mu.Lock()
	s := r.streams[p.Incarnation]
	r.mu.Unlock()
	if s != nil {
		s.receive(authority.Reply{Push: p})
	}
}

// drain asks every agent to leave; the channel closes when all have.
func (r *router) drain() <-chan struct{} {
	idle := make(chan struct{})
	r.mu.Lock()
	if len(r.streams) == 0 {
		close(idle)
	} else {
		r.idle = idle
	}
	r.mu.Unlock()
	for _, s := range r.open() {
		s.sendDrain()
	}
	return idle
}

func (r *router) open() []*stream {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]*stream, 0, len(r.streams))
	for _, s := range r.streams {
		all = append(all, s)
	}
	return all
}
