package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// Identity is who opens the stream.
type Identity struct {
	Owner       grant.Owner
	Incarnation grant.Incarnation
	Build       string // version of the program, for people
}

// Peer is what the authority said of itself in its welcome.
type Peer struct {
	Store     string
	MaxBatch  int
	RhoPPB    int64
	Tolerance time.Duration
	WasLost   bool // our lease had run out; we are registered again
}

// Events are called by Run's goroutines. All fields must be set.
type Events struct {
	Up      func(Peer)
	Down    func(error)
	Failed  func(error) // an attempt to open a stream; Down does not follow
	Grant   func(grant.GrantAnswer)
	Check   func(grant.CheckAnswer)
	Policy  func(wire.TenantPolicy)
	Fate    func(grant.Reason)
	Problem func(error) // an entry that cannot be read; the stream goes on
}

// State is for people and metrics.
type State struct {
	Up       bool
	Peer     Peer
	Dials    uint64 // attempts to open a stream
	Lost     uint64 // streams that ended after their welcome
	Batches  uint64
	Entries  uint64 // grant requests and Checks sent
	Queued   int
	Fate     grant.Reason
	LastFail string
}

// maxMessage bounds a frame from the authority, in bytes.
const maxMessage = 16 << 20

// windowBytes is what the authority may send ahead of the receiver: many times
// the answers that come within a round trip.
const windowBytes = 1 << 20

var (
	errSilence  = errors.New("nothing heard from the authority")
	errSession  = errors.New("the authority does not know this incarnation")
	errDraining = errors.New("the authority drains")
	errNoLink   = errors.New("link: no stream to the authority")
)

// Link is one agent's stream to one authority.
type Link struct {
	cfg Config
	id  Identity
	ev  Events
	q   queue
	tls credentials.TransportCredentials

	dials, lost, batches, entries atomic.Uint64

	discard   chan struct{} // a wish to discard, for the sender
	discarded chan struct{} // closed when the authority confirmed
	once      sync.Once

	mu      sync.Mutex
	up      bool
	closing bool // discarded: do not redial
	ended   chan struct{}
	peer    Peer
	fate    grant.Reason
	fail    error
}

// New makes a link; nothing is dialled before Run.
func New(cfg Config, id Identity, ev Events) (*Link, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	if err := id.Owner.Validate(); err != nil {
		return nil, err
	}
	secure, err := cfg.TLS.client()
	if err != nil {
		return nil, err
	}
	l := &Link{
		cfg: cfg, id: id, ev: ev,
		q:         queue{limit: cfg.Queue, wake: make(chan struct{}, 1)},
		tls:       insecure.NewCredentials(),
		discard:   make(chan struct{}, 1),
		discarded: make(chan struct{}),
	}
	if secure != nil {
		l.tls = credentials.NewTLS(secure)
	}
	return l, nil
}

// Grant queues a grant request. None: taken. Overloaded: the queue is full.
// Unavailable: there is no stream.
func (l *Link) Grant(r *grant.GrantRequest) grant.Reason { return l.q.putGrant(r) }

// Check queues a Check; results as Grant.
func (l *Link) Check(r *grant.CheckRequest) grant.Reason { return l.q.putCheck(r) }

// State tells how the link is doing.
func (l *Link) State() State {
	s := State{
		Dials: l.dials.Load(), Lost: l.lost.Load(), Batches: l.batches.Load(), Entries: l.entries.Load(),
		Queued: l.q.depth(),
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Up, s.Peer, s.Fate = l.up, l.peer, l.fate
	if l.fail != nil {
		s.LastFail = l.fail.Error()
	}
	return s
}

// Run keeps a stream open until ctx ends or Discard was confirmed. It returns
// nil then; there is no other way for it to end.
func (l *Link) Run(ctx context.Context) error {
	pause := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(l.cfg.RedialMin),
		backoff.WithMaxInterval(l.cfg.RedialMax),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(1), // full jitter: from zero to twice the interval
		backoff.WithMaxElapsedTime(0),
	)
	for {
		useful, err := l.stream(ctx)
		l.mu.Lock()
		l.fail = err
		closing := l.closing
		l.mu.Unlock()
		if ctx.Err() != nil || closing {
			return nil
		}
		if useful {
			pause.Reset()
		}
		timer := time.NewTimer(pause.NextBackOff())
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

func (l *Link) dial() (*grpc.ClientConn, error) {
	target := l.cfg.Target
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(l.tls),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		// A fixed window: to find a better one gRPC answers almost every small
		// frame with a ping of its own.
		grpc.WithStaticStreamWindowSize(windowBytes),
		grpc.WithStaticConnWindowSize(windowBytes),
		// One attempt per connection object: the pause between attempts is ours.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: time.Minute, Multiplier: 1, MaxDelay: time.Minute},
			MinConnectTimeout: l.cfg.Handshake,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
	}
	if l.cfg.Keepalive > 0 {
		opts = append(opts, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: l.cfg.Keepalive, Timeout: l.cfg.Silence}))
	}
	if l.cfg.Dial != nil {
		target = "passthrough:///" + target
		opts = append(opts, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return l.cfg.Dial(ctx, addr) }))
	}
	return grpc.NewClient(target, opts...)
}

// stream opens one stream and serves it until it ends. useful: an answer was
// heard on it, so that the next pause may be short.
func (l *Link) stream(parent context.Context) (useful bool, err error) {
	l.dials.Add(1)
	conn, err := l.dial()
	if err != nil {
		err = fmt.Errorf("link: %w", err)
		l.ev.Failed(err)
		return false, err
	}
	defer conn.Close()

	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	late := time.AfterFunc(l.cfg.Handshake, func() { cancel(fmt.Errorf("link: no welcome within %v", l.cfg.Handshake)) })
	s, peer, err := l.open(ctx, conn)
	if !late.Stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		if parent.Err() == nil { // else nobody wants the stream any more
			l.ev.Failed(err)
		}
		return false, err
	}

	l.q.reset(peer.MaxBatch)
	ended := make(chan struct{})
	l.mu.Lock()
	l.up, l.peer, l.ended = true, peer, ended
	l.mu.Unlock()
	l.ev.Up(peer)

	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return l.receive(s, &useful) })
	g.Go(func() error { return l.send(gctx, s) })
	g.Go(func() error { return l.watch(gctx) })
	// The group's context ends the sender and the watch; a blocked receive or
	// send of gRPC ends with the stream's own.
	stop := context.AfterFunc(gctx, func() { cancel(context.Cause(gctx)) })
	err = g.Wait()
	stop()

	l.q.shut()
	l.mu.Lock()
	l.up = false
	l.mu.Unlock()
	close(ended)
	l.lost.Add(1)
	l.ev.Down(err)
	return useful, err
}

// open sends Open and waits for Welcome.
func (l *Link) open(ctx context.Context, conn *grpc.ClientConn) (stipendv1.LinkService_LinkClient, Peer, error) {
	s, err := stipendv1.NewLinkServiceClient(conn).Link(ctx)
	if err != nil {
		return nil, Peer{}, fmt.Errorf("link: open: %w", err)
	}
	err = s.Send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Open{Open: &stipendv1.Open{
		Owner: string(l.id.Owner), Incarnation: l.id.Incarnation[:], Build: l.id.Build,
	}}})
	if err != nil { // the status comes from Recv
		_, err = s.Recv()
		return nil, Peer{}, fmt.Errorf("link: open: %w", err)
	}
	f, err := s.Recv()
	if err != nil {
		return nil, Peer{}, fmt.Errorf("link: welcome: %w", err)
	}
	w := f.GetWelcome()
	if w == nil {
		return nil, Peer{}, fmt.Errorf("link: welcome: the first frame is a %T", f.GetFrame())
	}
	return s, Peer{
		Store: w.GetStore(), MaxBatch: int(min(max(w.GetMaxBatch(), 1), 1<<16)),
		RhoPPB: w.GetRhoPpb(), Tolerance: w.GetTolerance().AsDuration(), WasLost: w.GetWasLost(),
	}, nil
}

// send is the only sender of the stream.
func (l *Link) send(ctx context.Context, s stipendv1.LinkService_LinkClient) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-l.discard:
			err := s.Send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Discard{Discard: &stipendv1.Discard{}}})
			if err != nil {
				return fmt.Errorf("link: discard: %w", err)
			}
		case <-l.q.wake:
		}
		for b := l.q.next(time.Now()); b != nil; b = l.q.next(time.Now()) {
			l.batches.Add(1)
			l.entries.Add(uint64(len(b.Grants) + len(b.Checks)))
			if err := s.Send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Batch{Batch: b}}); err != nil {
				return nil // the receiver learns why
			}
		}
	}
}

// watch ends the stream when it is silent for too long.
func (l *Link) watch(ctx context.Context) error {
	t := time.NewTicker(l.cfg.Silence / 4)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-t.C:
			if d := l.q.silent(now); d >= l.cfg.Silence {
				return fmt.Errorf("link: %w for %v", errSilence, d.Round(time.Millisecond))
			}
		}
	}
}

// receive reads frames until the stream ends.
func (l *Link) receive(s stipendv1.LinkService_LinkClient, useful *bool) error {
	for {
		f, err := s.Recv()
		if err != nil {
			return fmt.Errorf("link: %w", err)
		}
		switch f := f.GetFrame().(type) {
		case *stipendv1.LinkResponse_Batch:
			known := l.deliver(f.Batch)
			l.q.heard(time.Now(), len(f.Batch.GetGrants())+len(f.Batch.GetChecks()))
			if !known {
				return fmt.Errorf("link: %w", errSession)
			}
			*useful = true
		case *stipendv1.LinkResponse_Discarded:
			l.mu.Lock()
			l.closing = true
			l.mu.Unlock()
			l.once.Do(func() { close(l.discarded) })
			return errors.New("link: discarded")
		case *stipendv1.LinkResponse_Drain:
			*useful = true
			return fmt.Errorf("link: %w", errDraining)
		default:
			return fmt.Errorf("link: unexpected frame %T", f)
		}
	}
}

// deliver hands the entries of a batch on. known is false when one of them says
// that the authority does not know this incarnation.
func (l *Link) deliver(b *stipendv1.NodeBatch) (known bool) {
	known = true
	for _, m := range b.GetPolicies() { // first: prices before the answers that use them
		if p, err := wire.FromTenantPolicy(m); err != nil {
			l.ev.Problem(fmt.Errorf("link: policy of %q: %w", m.GetTenant(), err))
		} else {
			l.ev.Policy(p)
		}
	}
	for _, m := range b.GetGrants() {
		a, err := wire.FromGrantResponse(m, l.id.Incarnation)
		if err != nil {
			l.ev.Problem(fmt.Errorf("link: grant of %q: %w", m.GetTenant(), err))
			continue
		}
		known = known && a.Reason != grant.UnknownSession
		l.ev.Grant(a)
	}
	for _, m := range b.GetChecks() {
		a, err := wire.FromCheckResponse(m, l.id.Incarnation)
		if err != nil {
			l.ev.Problem(fmt.Errorf("link: check of %q: %w", m.GetTenant(), err))
			continue
		}
		known = known && a.Reason != grant.UnknownSession
		l.ev.Check(a)
	}
	if m := b.GetFate(); m != stipendv1.Reason_REASON_UNSPECIFIED {
		why, err := wire.FromReason(m)
		if err != nil {
			l.ev.Problem(fmt.Errorf("link: fate: %w", err))
			why = grant.Fenced // no more grants, whatever the word
		}
		l.mu.Lock()
		l.fate = why
		l.mu.Unlock()
		l.ev.Fate(why)
	}
	return known
}

// Discard tells the authority that every wallet of this incarnation is closed,
// and waits for its word until ctx ends. Without a stream it fails at once: the
// units then stay reserved until they expire. After success Run returns.
func (l *Link) Discard(ctx context.Context) error {
	l.mu.Lock()
	up, ended := l.up, l.ended
	l.mu.Unlock()
	if !up {
		return errNoLink
	}
	select {
	case l.discard <- struct{}{}:
	default: // already wished for
	}
	select {
	case <-l.discarded:
		return nil
	case <-ended:
		select {
		case <-l.discarded:
			return nil
		default:
			return fmt.Errorf("link: discard: the stream ended first")
		}
	case <-ctx.Done():
		return fmt.Errorf("link: discard: %w", ctx.Err())
	}
}
