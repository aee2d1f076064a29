package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/membership"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// handshakeTime bounds the time from the opening of a stream to its welcome.
const handshakeTime = 10 * time.Second

// linkService serves the streams of agents.
type linkService struct {
	stipendv1.UnimplementedLinkServiceServer
	d *daemon
}

// Link implements stipendv1.LinkServiceServer. One goroutine receives, one
// sends. gRPC ends a blocked Recv or Send only after the handler has returned, so
// the daemon, not the handler, waits for the two.
func (l *linkService) Link(g stipendv1.LinkService_LinkServer) error {
	first, accepted := make(chan opening, 1), make(chan *stream, 1)
	l.d.links.Go(func() { l.receive(g, first, accepted) })
	defer close(accepted)

	ctx, cancel := context.WithTimeoutCause(g.Context(), handshakeTime, fmt.Errorf("no welcome within %v", handshakeTime))
	defer cancel()
	var open opening
	select {
	case open = <-first:
	case <-ctx.Done():
		return status.Error(codes.DeadlineExceeded, context.Cause(ctx).Error())
	}
	s, session, err := l.register(ctx, open)
	if err != nil {
		l.d.metrics.linkRefused(err)
		return err
	}
	if session != nil {
		defer session.Close()
	}
	if before := l.d.router.attach(s); before != nil {
		before.abort(status.Error(codes.Aborted, "the incarnation opened another stream"))
	}
	defer l.d.router.detach(s)
	defer s.abort(errGone) // whatever still comes is dropped
	if l.d.draining() {
		return errDraining()
	}
	wasLost := session != nil && session.WasLost
	if err := g.Send(l.welcome(wasLost)); err != nil {
		return err
	}
	l.d.log.Info("agent linked", "owner", s.owner, "incarnation", s.inc, "build", open.build(), "was_lost", wasLost, "superseded", session == nil)
	accepted <- s
	sent := make(chan error, 1)
	l.d.links.Go(func() { sent <- s.send(g.Context(), g, l.d.cfg.Link.MaxBatch) })
	select {
	case err = <-sent:
	case <-s.aborted:
		err = s.why()
	}
	why := err
	if errors.Is(err, context.Canceled) { // of the stream: its end came before our last frame
		why = errGone
	}
	l.d.log.Info("agent gone", "owner", s.owner, "incarnation", s.inc, "why", why)
	switch err {
	case errGone:
		return nil
	case errSlow:
		l.d.metrics.slow.Inc()
	}
	return err
}

// opening is the first frame of a stream.
type opening struct {
	frame *stipendv1.LinkRequest
	err   error
}

func (o opening) build() string {
	b := o.frame.GetOpen().GetBuild()
	return b[:min(len(b), 64)]
}

// register registers the incarnation of the first frame. A superseded one gets a
// stream without a session, whose first frame tells its fate: it decides by
// Check, and must be able to after its stream broke or the authority restarted.
func (l *linkService) register(ctx context.Context, o opening) (*stream, *membership.Session, error) {
	if o.err != nil {
		return nil, nil, o.err
	}
	m := o.frame.GetOpen()
	if m == nil {
		return nil, nil, faulty(grant.Invalid, "the first frame must be open")
	}
	owner, err := wire.FromOwner(m.Owner)
	inc, err2 := wire.FromIncarnation(m.Incarnation)
	if err := errors.Join(err, err2); err != nil {
		return nil, nil, badRequest(err)
	}
	session, err := l.d.registry.Register(ctx, owner, inc)
	var final *membership.FinalError
	if errors.As(err, &final) && final.State == authority.Superseded {
		s := newStream(owner, inc, l.d.cfg.Link.MaxQueued)
		s.sendFate(grant.Superseded)
		return s, nil, nil
	}
	if err != nil {
		return nil, nil, registryError(err)
	}
	if err := l.d.router.settled(ctx, inc); err != nil {
		session.Close()
		return nil, nil, refuse(codes.Unavailable, grant.Unavailable, err.Error(), time.Second)
	}
	return newStream(owner, inc, l.d.cfg.Link.MaxQueued), session, nil
}

func (l *linkService) welcome(wasLost bool) *stipendv1.LinkResponse {
	cfg := l.d.cfg
	return &stipendv1.LinkResponse{Frame: &stipendv1.LinkResponse_Welcome{Welcome: &stipendv1.Welcome{
		Store:     l.d.storeName,
		MaxBatch:  uint32(cfg.Link.MaxBatch),
		RhoPpb:    cfg.Ledger.RhoPPB,
		Tolerance: durationpb.New(cfg.Ledger.Tolerance),
		WasLost:   wasLost,
	}}}
}

// receive reads the first frame for the handler and, once it was accepted, all
// others, until the stream ends.
func (l *linkService) receive(g stipendv1.LinkService_LinkServer, first chan<- opening, accepted <-chan *stream) {
	frame, err := g.Recv()
	first <- opening{frame, err}
	s, ok := <-accepted
	if !ok {
		return
	}
	batch := batchRouter{d: l.d, s: s}
	for {
		frame, err := g.Recv()
		if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled {
			s.end(errGone)
			return
		}
		if err == nil {
			err = l.frame(g.Context(), s, &batch, frame)
		}
		if err != nil {
			s.end(err)
			return
		}
	}
}

func (l *linkService) frame(ctx context.Context, s *stream, batch *batchRouter, frame *stipendv1.LinkRequest) error {
	switch f := frame.GetFrame().(type) {
	case *stipendv1.LinkRequest_Batch:
		n := len(f.Batch.GetGrants()) + len(f.Batch.GetChecks())
		if n > l.d.cfg.Link.MaxBatch {
			return faulty(grant.Invalid, fmt.Sprintf("batch: %d entries; allowed: at most %d, as the welcome said", n, l.d.cfg.Link.MaxBatch))
		}
		batch.route(f.Batch)
		return nil
	case *stipendv1.LinkRequest_Discard:
		return l.discard(ctx, s)
	}
	return faulty(grant.Invalid, "a frame must be batch or discard")
}

// discard makes the incarnation final everywhere, then confirms.
func (l *linkService) discard(ctx context.Context, s *stream) error {
	err := l.d.registry.Discard(ctx, s.inc)
	if err == nil {
		err = l.d.router.settled(ctx, s.inc)
	}
	if err != nil {
		return registryError(err)
	}
	s.sendDiscarded()
	return nil
}

// batchRouter sorts the entries of a frame by partition, so that each
// partition's lock is taken once per frame. Used by one receiver.
type batchRouter struct {
	d      *daemon
	s      *stream
	calls  [grant.Partitions][]authority.Call
	filled []grant.Partition
}

func (b *batchRouter) route(m *stipendv1.AgentBatch) {
	now := b.d.clock().Mono
	for _, g := range m.GetGrants() {
		req, err := wire.FromGrantRequest(g, b.s.inc)
		if err != nil {
			b.s.receive(authority.Reply{Grant: &grant.GrantAnswer{
				Tenant: grant.TenantID(shorten(g.GetTenant())), Incarnation: b.s.inc, Emergency: g.GetEmergency(), ID: grant.GrantID(g.GetGrantId()),
				Result: grant.Refused, Reason: grant.Invalid,
			}})
			continue
		}
		// A grant has no deadline: its waiters come and go, its units stay useful.
		b.add(req.Tenant, authority.Call{Caller: b.s, Grant: &req})
	}
	for _, c := range m.GetChecks() {
		req, err := wire.FromCheckRequest(c, b.s.inc)
		if err != nil {
			b.s.receive(authority.Reply{Check: &grant.CheckAnswer{
				Tenant: grant.TenantID(shorten(c.GetTenant())), Attempt: grant.Attempt{Incarnation: b.s.inc, Seq: c.GetSequence()},
				Verdict: grant.Reject, Reason: grant.Invalid,
			}})
			continue
		}
		b.add(req.Tenant, authority.Call{Caller: b.s, Check: &req, Deadline: deadline(now, req.Budget)})
	}
	for _, p := range b.filled {
		b.d.partitions[p].queue(b.calls[p]...)
		clear(b.calls[p])
		b.calls[p] = b.calls[p][:0]
	}
	// Only now, so that one round takes the whole frame.
	for _, p := range b.filled {
		part := b.d.partitions[p]
		part.drive.mark(part.bit)
	}
	b.filled = b.filled[:0]
}

func (b *batchRouter) add(t grant.TenantID, c authority.Call) {
	p := grant.PartitionOf(t)
	if len(b.calls[p]) == 0 {
		b.filled = append(b.filled, p)
	}
	b.calls[p] = append(b.calls[p], c)
}

// shorten bounds what is echoed of a tenant id that was refused.
func shorten(t string) string { return t[:min(len(t), grant.MaxTenantLen)] }

// registryError turns an error of the registry into a status.
func registryError(err error) error {
	var final *membership.FinalError
	switch {
	case errors.As(err, &final):
		return refuse(codes.FailedPrecondition, fateOf(final.State), err.Error(), 0)
	case errors.Is(err, membership.ErrOwnerDiffers):
		return refuse(codes.FailedPrecondition, grant.Conflict, err.Error(), 0)
	case errors.Is(err, membership.ErrUnknown):
		return refuse(codes.NotFound, grant.UnknownSession, err.Error(), 0)
	case errors.Is(err, membership.ErrFull):
		return refuse(codes.ResourceExhausted, grant.Overloaded, err.Error(), 5*time.Second)
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	}
	return refuse(codes.Unavailable, grant.Unavailable, err.Error(), time.Second)
}
