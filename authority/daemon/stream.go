package daemon

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// stream is the outgoing side of one agent's link: a bounded queue that many
// partitions fill and one sender goroutine drains.
type stream struct {
	inc   grant.Incarnation
	owner grant.Owner
	limit int // queued replies; one more ends the stream

	mu        sync.Mutex
	queue     []authority.Reply
	fate      grant.Reason // to send once
	fateSent  bool
	discarded bool
	draining  bool
	ended     error // why the stream ends; nil while it lives

	wake    chan struct{} // capacity 1
	quit    chan struct{} // closed with ended: the sender flushes and goes
	aborted chan struct{} // closed by abort: the handler goes, flushed or not
}

func newStream(owner grant.Owner, inc grant.Incarnation, limit int) *stream {
	return &stream{inc: inc, owner: owner, limit: limit, wake: make(chan struct{}, 1), quit: make(chan struct{}), aborted: make(chan struct{})}
}

var errSlow = status.Error(codes.ResourceExhausted, "the agent does not read its answers: the stream is closed")

// receive queues a reply and wakes the sender.
func (s *stream) receive(r authority.Reply) {
	s.put(r)
	s.signal()
}

// put queues a reply; a full queue ends the stream, whose agent asks again on
// the next one.
func (s *stream) put(r authority.Reply) {
	s.mu.Lock()
	slow := s.ended == nil && len(s.queue) >= s.limit
	if s.ended == nil && !slow {
		s.queue = append(s.queue, r)
	}
	s.mu.Unlock()
	if slow {
		s.abort(errSlow)
	}
}

func (s *stream) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *stream) sendFate(why grant.Reason) {
	s.mu.Lock()
	if !s.fateSent {
		s.fate, s.fateSent = why, true
	}
	s.mu.Unlock()
	s.signal()
}

func (s *stream) sendDiscarded() {
	s.mu.Lock()
	s.discarded = true
	s.mu.Unlock()
	s.signal()
}

func (s *stream) sendDrain() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.signal()
}

// end lets the sender flush what is queued and then closes the stream with err.
func (s *stream) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended == nil {
		s.ended = err
		close(s.quit)
	}
}

// abort ends the stream at once. A sender may be blocked in the flow control of
// an agent that does not read: only the handler's return frees it.
func (s *stream) abort(err error) {
	s.end(err)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = nil
	select {
	case <-s.aborted:
	default:
		close(s.aborted)
	}
}

func (s *stream) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// send drains the queue into frames of at most batch entries until the stream
// ends, and returns why it did.
func (s *stream) send(ctx context.Context, out stipendv1.LinkService_LinkServer, batch int) error {
	for {
		s.mu.Lock()
		queue, fate, discarded, draining, ended := s.queue, s.fate, s.discarded, s.draining, s.ended
		s.queue, s.fate, s.discarded, s.draining = nil, grant.None, false, false
		s.mu.Unlock()
		if err := s.frames(out, queue, fate, batch); err != nil {
			return err
		}
		if discarded {
			if err := out.Send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Discarded{Discarded: &stipendv1.Discarded{}}}); err != nil {
				return err
			}
		}
		if draining {
			if err := out.Send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Drain{Drain: &stipendv1.Drain{}}}); err != nil {
				return err
			}
		}
		if len(queue) > 0 || discarded || draining {
			continue
		}
		if ended != nil {
			return ended
		}
		select {
		case <-s.wake:
		case <-s.quit:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *stream) frames(out stipendv1.LinkService_LinkServer, queue []authority.Reply, fate grant.Reason, batch int) error {
	for len(queue) > 0 || fate != grant.None {
		n := min(len(queue), batch)
		frame := &stipendv1.NodeBatch{}
		for _, r := range queue[:n] {
			switch {
			case r.Check != nil:
				frame.Checks = append(frame.Checks, wire.ToCheckResponse(r.Check))
			case r.Grant != nil:
				frame.Grants = append(frame.Grants, wire.ToGrantResponse(r.Grant))
			case r.Push != nil:
				frame.Policies = append(frame.Policies, wire.ToTenantPolicy(wire.TenantPolicy(r.Push.VersionedPolicy)))
			}
		}
		queue = queue[n:]
		if len(queue) == 0 && fate != grant.None {
			frame.Fate, fate = wire.ToReason(fate), grant.None
		}
		if err := out.Send(&stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Batch{Batch: frame}}); err != nil {
			return err
		}
	}
	return nil
}

// errGone is how a stream ends that its agent closed.
var errGone = errors.New("closed by the agent, or its connection broke")
