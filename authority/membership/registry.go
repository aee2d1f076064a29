package membership

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Registry is what this authority knows of incarnations. Its methods are safe
// for concurrent use.
type Registry struct {
	cfg    Config
	log    *slog.Logger
	server *server // nil with an external etcd
	client *clientv3.Client

	keepers  sync.WaitGroup // keep-alive loops of sessions
	stop     context.CancelFunc
	lifetime context.Context

	mu      sync.Mutex
	table   map[grant.Incarnation]*entry
	applied int64         // etcd revision that table shows
	moved   chan struct{} // closed when applied grows; then replaced
	status  Status

	homeRev   int64  // of the home key as compared or claimed; 0: there was none
	homeValue string // last value that we wrote or tried to write
	claimed   bool
	claiming  bool
	toldRev   int64 // of the home key as etcd's watch told it
	toldValue string
}

// entry is one known incarnation.
type entry struct {
	owner grant.Owner
	fate  authority.MemberState // Live until it is final
	rev   int64                 // mod revision of its inc record
	lease bool                  // its live key exists
	shown authority.MemberState // last state handed out
	since time.Time             // when this process saw it lose its lease or become final
}

func (e *entry) state() authority.MemberState {
	switch {
	case e.fate.Final():
		return e.fate
	case e.lease:
		return authority.Live
	}
	return authority.Lost
}

// record is the value of an inc key.
type record struct {
	Owner string `json:"owner"`
	State string `json:"state"` // "live" or a final state
}

// Status is the health of etcd as last seen.
type Status struct {
	// NoSpace: etcd's database reached its quota and refuses writes; nobody can
	// register until it has room again.
	NoSpace bool
	// Err is why the last health question failed; empty: it was answered.
	Err string
}

// ErrNoSpace says that etcd refuses writes because its database is full.
var ErrNoSpace = errors.New("etcd's database is full (NOSPACE): raise its quota, or compact, defragment and disarm the alarm")

// ErrFull says that every incarnation that may be remembered has a lease.
var ErrFull = errors.New("too many incarnations are registered")

// Open starts or dials etcd and reads the known incarnations.
func Open(ctx context.Context, cfg Config) (*Registry, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("membership: %w", err)
	}
	if cfg.Dir == "" && len(cfg.Endpoints) == 0 {
		return nil, errors.New("membership: endpoints: none; allowed: at least one, or a data folder for the embedded etcd")
	}
	r := &Registry{
		cfg:   cfg,
		log:   cmp.Or(cfg.Logger, slog.Default()),
		table: make(map[grant.Incarnation]*entry),
		moved: make(chan struct{}),
	}
	var err error
	if cfg.Dir != "" {
		r.server, r.client, err = startEmbedded(ctx, cfg.Dir, cfg.QuotaBytes, r.log)
	} else {
		r.client, err = dial(cfg)
	}
	if err != nil {
		return nil, fmt.Errorf("membership: %w", err)
	}
	r.lifetime, r.stop = context.WithCancel(context.Background())
	if _, err := r.list(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("membership: read incarnations: %w", err), r.Close())
	}
	return r, nil
}

func dial(cfg Config) (*clientv3.Client, error) {
	tc, err := cfg.tlsConfig()
	if err != nil {
		return nil, err
	}
	var password []byte
	if cfg.PasswordFile != "" {
		if password, err = os.ReadFile(cfg.PasswordFile); err != nil {
			return nil, fmt.Errorf("password_file: %w", err)
		}
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints:            cfg.Endpoints,
		TLS:                  tc,
		Username:             cfg.Username,
		Password:             strings.TrimRight(string(password), "\r\n"),
		DialTimeout:          5 * time.Second,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 5 * time.Second,
		Logger:               zap.NewNop(), // every failure reaches a caller or Status
	})
	if err != nil {
		return nil, fmt.Errorf("dial etcd at %s: %w", strings.Join(cfg.Endpoints, ", "), err)
	}
	return c, nil
}

// Close ends the keep-alive loops of the sessions still open, the client and
// the embedded server. Leases run out by themselves.
func (r *Registry) Close() error {
	r.stop()
	r.keepers.Wait()
	err := r.client.Close()
	if errors.Is(err, context.Canceled) {
		err = nil // how the client of an embedded server says that it is closed
	}
	if r.server != nil {
		r.server.close()
	}
	if err != nil {
		return fmt.Errorf("membership: close etcd client: %w", err)
	}
	return nil
}

// Snapshot lists all known incarnations in order of owner, then incarnation.
// What Run's callback tells afterwards are the changes to it.
func (r *Registry) Snapshot() []authority.Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]authority.Member, 0, len(r.table))
	for inc, e := range r.table {
		all = append(all, authority.Member{Incarnation: inc, Owner: e.owner, State: e.shown})
	}
	sortMembers(all)
	return all
}

func sortMembers(all []authority.Member) {
	slices.SortFunc(all, func(a, b authority.Member) int {
		return cmp.Or(cmp.Compare(a.Owner, b.Owner), slices.Compare(a.Incarnation[:], b.Incarnation[:]))
	})
}

// Counts is the number of known incarnations by state.
func (r *Registry) Counts() map[authority.MemberState]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := make(map[authority.MemberState]int)
	for _, e := range r.table {
		n[e.shown]++
	}
	return n
}

// Status is the health of etcd at the last look, at most 10 s ago.
func (r *Registry) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

// Run follows etcd until ctx ends or etcd does, and hands every change to
// onChange: in order, one call at a time, from one goroutine. onChange must not
// block for long: Register and Discard wait for it. It returns nil when ctx
// ended, ErrHomeMoved when another store was made the home, or why etcd is gone.
func (r *Registry) Run(ctx context.Context, onChange func(authority.Member)) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.follow(ctx, onChange) })
	g.Go(func() error { return r.tend(ctx) })
	if r.server != nil {
		g.Go(func() error {
			select {
			case <-ctx.Done():
				return nil
			case err := <-r.server.etcd.Err():
				return fmt.Errorf("membership: embedded etcd failed: %w", err)
			case <-r.server.etcd.Server.StopNotify():
				return errors.New("membership: embedded etcd stopped")
			}
		})
	}
	return g.Wait()
}

// follow applies what etcd's watch tells. When the watch breaks, or history was
// compacted under it, the table is read anew and the differences are handed out.
func (r *Registry) follow(ctx context.Context, onChange func(authority.Member)) error {
	for {
		r.mu.Lock()
		from := r.applied + 1
		r.mu.Unlock()
		err := r.watch(ctx, from, onChange)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, ErrHomeMoved) {
			return err
		}
		r.log.Warn("membership: watch broke; reading all incarnations anew", "error", err)
		changes, err := r.list(ctx)
		for err != nil {
			if errors.Is(err, ErrHomeMoved) {
				return err
			}
			r.log.Warn("membership: cannot read incarnations", "error", err)
			if !wait(ctx, time.Second) {
				return nil
			}
			changes, err = r.list(ctx)
		}
		for _, m := range changes {
			onChange(m)
		}
		r.advance(0)
	}
}

func (r *Registry) watch(ctx context.Context, from int64, onChange func(authority.Member)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if r.server == nil {
		ctx = clientv3.WithRequireLeader(ctx)
	}
	for resp := range r.client.Watch(ctx, r.cfg.Prefix, clientv3.WithPrefix(), clientv3.WithRev(from)) {
		if err := resp.Err(); err != nil {
			return err
		}
		changes, err := r.apply(resp.Events)
		for _, m := range changes {
			onChange(m)
		}
		r.advance(resp.Header.Revision)
		if err != nil {
			return err
		}
	}
	return errors.New("etcd closed the watch")
}

// apply enters events into the table and returns what they change, in order of
// revision and, within one transaction, of the keys' first mention.
func (r *Registry) apply(events []*clientv3.Event) ([]authority.Member, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []authority.Member
	var touched []grant.Incarnation
	flush := func() {
		for _, inc := range touched {
			if m, changed := r.settle(inc); changed {
				out = append(out, m)
			}
		}
		touched = touched[:0]
	}
	var failed error
	rev := int64(0)
	for _, ev := range events {
		if ev.Kv.ModRevision != rev {
			flush()
			rev = ev.Kv.ModRevision
		}
		inc, ok, err := r.enter(ev.Kv, ev.Type == clientv3.EventTypeDelete)
		if err != nil {
			failed = errors.Join(failed, err)
		}
		if ok && !slices.Contains(touched, inc) {
			touched = append(touched, inc)
		}
	}
	flush()
	return out, failed
}

// enter notes one key; ok says that it belongs to an incarnation.
func (r *Registry) enter(kv *mvccpb.KeyValue, deleted bool) (inc grant.Incarnation, ok bool, err error) {
	name, found := strings.CutPrefix(string(kv.Key), r.cfg.Prefix)
	if !found {
		return inc, false, nil
	}
	kind, rest, _ := strings.Cut(name, "/")
	if kind == "home" {
		return inc, false, r.homeChanged(kv, deleted)
	}
	if kind != "inc" && kind != "live" {
		return inc, false, nil
	}
	inc, err = grant.ParseIncarnation(rest)
	if err != nil {
		r.log.Warn("membership: unknown key in etcd", "key", string(kv.Key))
		return inc, false, nil
	}
	e := r.table[inc]
	if e == nil {
		if deleted {
			return inc, false, nil
		}
		e = new(entry)
		r.table[inc] = e
	}
	switch {
	case kind == "live":
		e.lease = !deleted
	case deleted:
		e.rev = 0
	default:
		owner, fate, err := parseRecord(kv.Value)
		if err != nil {
			// What cannot be read is taken for the worse: no more grants.
			r.log.Error("membership: unreadable record in etcd; taken for fenced", "key", string(kv.Key), "error", err)
			fate = authority.Fenced
		}
		e.owner, e.fate, e.rev = owner, fate, kv.ModRevision
	}
	return inc, true, nil
}

// settle decides whether the incarnation's state changed, and forgets those
// whose record is gone.
func (r *Registry) settle(inc grant.Incarnation) (authority.Member, bool) {
	e := r.table[inc]
	if e == nil {
		return authority.Member{}, false
	}
	if e.rev == 0 {
		if !e.lease {
			delete(r.table, inc)
		}
		return authority.Member{}, false
	}
	now := e.state()
	if now == e.shown {
		return authority.Member{}, false
	}
	e.shown, e.since = now, time.Now()
	return authority.Member{Incarnation: inc, Owner: e.owner, State: now}, true
}

// list reads all keys at one revision into the table and returns the changes,
// in the order of Snapshot.
func (r *Registry) list(ctx context.Context) ([]authority.Member, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := r.client.Get(ctx, r.cfg.Prefix, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.table {
		e.rev, e.lease = 0, false
	}
	for _, kv := range resp.Kvs {
		if _, _, err := r.enter(kv, false); err != nil {
			return nil, err
		}
	}
	var out []authority.Member
	for inc := range r.table {
		if m, changed := r.settle(inc); changed {
			out = append(out, m)
		}
	}
	sortMembers(out)
	r.applied = resp.Header.Revision
	return out, nil
}

// advance says that everything up to the revision was handed out; 0: up to what
// list has read.
func (r *Registry) advance(rev int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.applied = max(r.applied, rev)
	close(r.moved)
	r.moved = make(chan struct{})
}

// handedOut waits until Run's callback has returned for everything up to rev.
func (r *Registry) handedOut(ctx context.Context, rev int64) error {
	for {
		r.mu.Lock()
		done, moved := r.applied >= rev, r.moved
		r.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-moved:
		case <-r.lifetime.Done():
			return errors.New("membership: closed")
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func parseRecord(value []byte) (grant.Owner, authority.MemberState, error) {
	var rec record
	if err := json.Unmarshal(value, &rec); err != nil {
		return "", authority.Fenced, err
	}
	for s := authority.Live; s <= authority.Fenced; s++ {
		if s != authority.Lost && s.String() == rec.State {
			return grant.Owner(rec.Owner), s, nil
		}
	}
	return grant.Owner(rec.Owner), authority.Fenced, fmt.Errorf("state %q is not known", rec.State)
}

func (rec record) bytes() string {
	b, err := json.Marshal(rec)
	if err != nil {
		panic(err) // two strings always encode
	}
	return string(b)
}

// wait is false when ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// plain turns etcd's error for a full database into ErrNoSpace and notes it.
func (r *Registry) plain(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.plainLocked(err)
}

func (r *Registry) plainLocked(err error) error {
	if errors.Is(err, rpctypes.ErrNoSpace) || errors.Is(err, rpctypes.ErrGRPCNoSpace) {
		first := !r.status.NoSpace
		r.status.NoSpace = true
		if first {
			r.log.Error("membership: etcd is out of space; nobody can register")
		}
		return ErrNoSpace
	}
	return err
}
