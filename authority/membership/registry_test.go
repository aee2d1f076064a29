package membership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// shared is one real embedded etcd for all tests of the binary; each test has a
// prefix of its own and reaches it as an external one, through the socket.
var shared string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "stipend-etcd")
	if err != nil {
		panic(err)
	}
	srv, client, err := startEmbedded(context.Background(), dir, 64<<20, slog.New(slog.DiscardHandler))
	if err != nil {
		panic(err)
	}
	shared = "unix://" + filepath.Join(dir, SocketName)
	code := m.Run()
	client.Close()
	srv.close()
	os.RemoveAll(dir)
	os.Exit(code)
}

// world is a Registry under test, with the changes that it handed out.
type world struct {
	*Registry
	t    *testing.T
	stop func()

	mu      sync.Mutex
	changes []authority.Member
	more    chan struct{}
}

func testConfig(t *testing.T) Config {
	cfg := DefaultConfig()
	cfg.Endpoints = []string{shared}
	cfg.Prefix = "/" + t.Name() + "/"
	cfg.LeaseTTL = 2 * time.Second
	cfg.Logger = slog.New(slog.DiscardHandler)
	return cfg
}

func start(t *testing.T, cfg Config) *world {
	t.Helper()
	r, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Registry: r, t: t, more: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error {
		return r.Run(ctx, func(m authority.Member) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.changes = append(w.changes, m)
			close(w.more)
			w.more = make(chan struct{})
		})
	})
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := g.Wait(); err != nil {
			t.Errorf("Run: %v", err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	t.Cleanup(w.stop)
	return w
}

// await waits until the incarnation was told to be in the state.
func (w *world) await(i grant.Incarnation, s authority.MemberState) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 15*time.Second)
	defer cancel()
	for {
		w.mu.Lock()
		found := slices.ContainsFunc(w.changes, func(m authority.Member) bool { return m.Incarnation == i && m.State == s })
		more := w.more
		w.mu.Unlock()
		if found {
			return
		}
		select {
		case <-more:
		case <-ctx.Done():
			w.t.Fatalf("%v never became %v; told: %v", i, s, w.changes)
		}
	}
}

func (w *world) told() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, m := range w.changes {
		out = append(out, fmt.Sprintf("%s/%d %v", m.Owner, m.Incarnation[0], m.State))
	}
	return out
}

func (w *world) register(owner grant.Owner, i grant.Incarnation) *Session {
	w.t.Helper()
	s, err := w.Register(w.t.Context(), owner, i)
	if err != nil {
		w.t.Fatalf("register %s: %v", owner, err)
	}
	return s
}

func inc(n byte) grant.Incarnation { return grant.Incarnation{n} }

func finalState(err error) authority.MemberState {
	var f *FinalError
	if errors.As(err, &f) {
		return f.State
	}
	return 0
}

// A stream's end makes its incarnation lost only when the lease ran out; it
// then comes back under its own id and is told that it was lost.
func TestLostAndBack(t *testing.T) {
	w := start(t, testConfig(t))
	s := w.register("gw", inc(1))
	if s.WasLost {
		t.Error("the first registration says that it was lost")
	}
	again := w.register("gw", inc(1)) // a new stream before the old lease ended
	if again.WasLost {
		t.Error("a renewal before the lease ended says that it was lost")
	}
	s.Close()
	again.Close()
	w.await(inc(1), authority.Lost)
	back := w.register("gw", inc(1))
	defer back.Close()
	if !back.WasLost {
		t.Error("a return after the lease ended does not say that it was lost")
	}
	if got, want := w.told(), []string{"gw/1 live", "gw/1 lost", "gw/1 live"}; !slices.Equal(got, want) {
		t.Errorf("told %v, want %v", got, want)
	}
}

// While the stream lives the lease is kept alive past its ttl.
func TestKeptAlive(t *testing.T) {
	w := start(t, testConfig(t))
	kept := w.register("kept", inc(1))
	defer kept.Close()
	left := w.register("left", inc(2))
	left.Close()
	w.await(inc(2), authority.Lost) // at least one ttl later
	w.register("left", inc(2)).Close()
	if got := w.Counts()[authority.Live]; got != 2 {
		t.Errorf("%d live, want 2; told %v", got, w.told())
	}
}

// A lease that etcd ended under an open stream is replaced.
func TestLeaseRevokedUnderAnOpenStream(t *testing.T) {
	w := start(t, testConfig(t))
	defer w.register("gw", inc(1)).Close()
	got, err := w.client.Get(t.Context(), w.liveKey(inc(1)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.client.Revoke(t.Context(), clientv3.LeaseID(got.Kvs[0].Lease)); err != nil {
		t.Fatal(err)
	}
	w.await(inc(1), authority.Lost)
	for w.Counts()[authority.Live] == 0 { // the keeper registers again by itself
		w.mu.Lock()
		more := w.more
		done := len(w.changes) >= 3
		w.mu.Unlock()
		if done {
			break
		}
		select {
		case <-more:
		case <-time.After(15 * time.Second):
			t.Fatal("never registered again")
		}
	}
	if got, want := w.told(), []string{"gw/1 live", "gw/1 lost", "gw/1 live"}; !slices.Equal(got, want) {
		t.Errorf("told %v, want %v", got, want)
	}
}

// A newer process of the same name ends the older one for good, and the older
// one's end is told before the newer one's beginning.
func TestSupersede(t *testing.T) {
	w := start(t, testConfig(t))
	defer w.register("gw", inc(1)).Close()
	defer w.register("gw", inc(2)).Close()
	if _, err := w.Register(t.Context(), "gw", inc(1)); finalState(err) != authority.Superseded {
		t.Errorf("the older one registers again: %v", err)
	}
	if got, want := w.told(), []string{"gw/1 live", "gw/1 superseded", "gw/2 live"}; !slices.Equal(got, want) {
		t.Errorf("told %v, want %v", got, want)
	}
}

// Of many processes that register one name at once, all but one are
// superseded: the change is one transaction.
func TestSupersedeConcurrently(t *testing.T) {
	w := start(t, testConfig(t))
	var g errgroup.Group
	for n := byte(1); n <= 16; n++ {
		g.Go(func() error {
			_, err := w.Register(t.Context(), "gw", inc(n))
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if c := w.Counts(); c[authority.Live] != 1 || c[authority.Superseded] != 15 {
		t.Errorf("states %v, want 1 live and 15 superseded", c)
	}
}

// Final states never change, are repeated without harm and survive a restart.
func TestFinalStates(t *testing.T) {
	cfg := testConfig(t)
	w := start(t, cfg)
	w.register("a", inc(1)).Close()
	w.register("b", inc(2)).Close()
	w.register("c", inc(3)).Close()
	w.register("c", inc(4)).Close()
	for range 2 {
		if err := w.Discard(t.Context(), inc(1)); err != nil {
			t.Fatal(err)
		}
		if err := w.Fence(t.Context(), inc(2)); err != nil {
			t.Fatal(err)
		}
	}
	w.register("d", inc(5)).Close()
	w.register("d", inc(6)).Close()
	if err := w.Discard(t.Context(), inc(5)); err != nil {
		t.Errorf("a superseded one discards: %v", err)
	}
	if err := w.Fence(t.Context(), inc(1)); finalState(err) != authority.Discarded {
		t.Errorf("fence of a discarded one: %v", err)
	}
	if err := w.Discard(t.Context(), inc(9)); !errors.Is(err, ErrUnknown) {
		t.Errorf("discard of an unknown one: %v", err)
	}
	w.stop()

	w = start(t, cfg)
	for n, want := range map[byte]authority.MemberState{1: authority.Discarded, 2: authority.Fenced, 3: authority.Superseded} {
		if _, err := w.Register(t.Context(), "zombie", inc(n)); finalState(err) != want {
			t.Errorf("after a restart %d registers again: %v, want %v", n, err, want)
		}
	}
	var states []string
	for _, m := range w.Snapshot() {
		states = append(states, fmt.Sprintf("%s/%d %v", m.Owner, m.Incarnation[0], m.State))
	}
	if got := strings.Join(states[:3], ", "); got != "a/1 discarded, b/2 fenced, c/3 superseded" {
		t.Errorf("snapshot %s", got)
	}
}

// Case 18: an empty name is refused, and so is another name for one incarnation.
func TestNames(t *testing.T) {
	w := start(t, testConfig(t))
	if _, err := w.Register(t.Context(), "", inc(1)); err == nil || !strings.Contains(err.Error(), "owner: is empty") {
		t.Errorf("empty name: %v", err)
	}
	if _, err := w.Register(t.Context(), "gw", grant.Incarnation{}); err == nil {
		t.Error("the zero incarnation registered")
	}
	w.register("gw", inc(1)).Close()
	if _, err := w.Register(t.Context(), "other", inc(1)); !errors.Is(err, ErrOwnerDiffers) {
		t.Errorf("another name for one incarnation: %v", err)
	}
}

// Case 18: an agent that comes back 100 times in a minute is let in each time,
// while the memory for its former lives stays bounded; one that was fenced is
// remembered longest.
func TestMemoryIsBounded(t *testing.T) {
	cfg := testConfig(t)
	cfg.MaxIncarnations = 8
	w := start(t, cfg)
	w.register("bad", inc(200)).Close()
	if err := w.Fence(t.Context(), inc(200)); err != nil {
		t.Fatal(err)
	}
	for n := byte(1); n <= 100; n++ {
		w.register("flapping", inc(n)).Close()
	}
	if n := len(w.Snapshot()); n > cfg.MaxIncarnations {
		t.Errorf("%d incarnations are remembered, at most %d allowed", n, cfg.MaxIncarnations)
	}
	if _, err := w.Register(t.Context(), "bad", inc(200)); finalState(err) != authority.Fenced {
		t.Errorf("the fenced one was forgotten first: %v", err)
	}
	got, err := w.client.Get(t.Context(), cfg.Prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		t.Fatal(err)
	}
	if most := int64(3 * cfg.MaxIncarnations); got.Count > most {
		t.Errorf("etcd holds %d keys, at most %d allowed", got.Count, most)
	}
	for n := byte(101); n <= 108; n++ {
		_, err = w.Register(t.Context(), grant.Owner(fmt.Sprintf("gw-%d", n)), inc(n))
		if err != nil {
			break
		}
	}
	if !errors.Is(err, ErrFull) {
		t.Errorf("with a lease under every one remembered a newcomer got: %v", err)
	}
}

// Retention: what lost its lease or ended long ago is forgotten, what lives is not.
func TestForgetting(t *testing.T) {
	w := start(t, testConfig(t))
	defer w.register("gw", inc(1)).Close()
	defer w.register("gw", inc(2)).Close()
	if got := w.outlived(time.Now()); len(got) != 0 {
		t.Errorf("at once %v are to be forgotten", got)
	}
	late := time.Now().Add(w.cfg.Retention + time.Second)
	if got := w.outlived(late); !slices.Equal(got, []grant.Incarnation{inc(1)}) {
		t.Errorf("after the retention %v are to be forgotten, want only the superseded one", got)
	}
	for _, i := range []grant.Incarnation{inc(1), inc(2)} { // the live one must survive the attempt
		if err := w.forget(t.Context(), i); err != nil {
			t.Fatal(err)
		}
	}
	w.register("other", inc(3)).Close() // its event comes behind those of forget
	if c := w.Counts(); c[authority.Superseded] != 0 || c[authority.Live] != 2 {
		t.Errorf("states %v, want 2 live", c)
	}
}

// With one external etcd every authority is told of every change.
func TestTwoAuthorities(t *testing.T) {
	cfg := testConfig(t)
	a, b := start(t, cfg), start(t, cfg)
	s := a.register("gw", inc(1))
	b.await(inc(1), authority.Live)
	if err := b.Fence(t.Context(), inc(1)); err != nil {
		t.Fatal(err)
	}
	a.await(inc(1), authority.Fenced)
	s.Close()
	defer b.register("gw", inc(2)).Close()
	a.await(inc(2), authority.Live)
}

// A watch that lost history (compaction while away) is made good by reading
// everything anew: the differences are told, nothing twice.
func TestListAnew(t *testing.T) {
	cfg := testConfig(t)
	w := start(t, cfg)
	other, err := Open(t.Context(), cfg) // does not follow: its table stays behind
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	w.register("gw", inc(1)).Close()
	w.register("gw", inc(2)).Close()
	for round, want := range []int{2, 0} {
		changes, err := other.list(t.Context())
		if err != nil || len(changes) != want {
			t.Errorf("round %d: %v, %v; want %d changes", round, changes, err, want)
		}
	}
}

// The home test refuses a second store, a backup, and a store whose etcd was
// lost; of two copies only the first to claim serves; recovery adopts.
func TestHome(t *testing.T) {
	cfg := testConfig(t)
	w := start(t, cfg)
	ctx := t.Context()
	first, second := [16]byte{1}, [16]byte{2}
	steps := []struct {
		name    string
		s       Store
		refused bool
	}{
		{"etcd was lost: a store with records and no home", Store{first, 7, false}, true},
		{"first use: an empty store", Store{first, 1, true}, false},
		{"a restart", Store{first, 2, false}, false},
		{"marks that never got here are skipped", Store{first, 9, false}, false},
		{"a restored backup", Store{first, 9, false}, true},
		{"a second node or a replaced disk", Store{second, 100, true}, true},
		{"the home still serves", Store{first, 10, false}, false},
	}
	for _, s := range steps {
		err := w.CompareHome(ctx, s.s)
		if errors.Is(err, ErrNotHome) != s.refused || (err != nil) != s.refused {
			t.Errorf("%s: %v", s.name, err)
		}
		if s.refused {
			if !strings.Contains(err.Error(), "stipend recover") {
				t.Errorf("%s: the error does not say what to do: %v", s.name, err)
			}
			continue
		}
		if err := w.ClaimHome(ctx, Store{s.s.Identity, s.s.Mark + 1, false}); err != nil {
			t.Errorf("%s: claim: %v", s.name, err)
		}
	}
	if id, mark, ok, err := w.Home(ctx); id != first || mark != 11 || !ok || err != nil {
		t.Errorf("home is %x, %d, %v, %v", id, mark, ok, err)
	}
	if err := w.AdoptHome(ctx, Store{second, 1, true}); err != nil {
		t.Fatal(err)
	}
	if err := w.CompareHome(ctx, Store{first, 12, false}); !errors.Is(err, ErrNotHome) {
		t.Errorf("after recovery the former store serves: %v", err)
	}
	if err := w.CompareHome(ctx, Store{second, 1, false}); err != nil {
		t.Errorf("after recovery the new store: %v", err)
	}
}

// A copy of the disk with the same mark that claims the home while the original
// serves ends the original.
func TestHomeMovedWhileServing(t *testing.T) {
	cfg := testConfig(t)
	r, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	copied, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer copied.Close()
	serves := func(r *Registry, s Store) {
		t.Helper()
		if err := r.CompareHome(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		s.Mark++
		if err := r.ClaimHome(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	serves(r, Store{[16]byte{1}, 1, true})
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context(), func(authority.Member) {}) }()
	if _, err := r.Register(t.Context(), "gw", inc(1)); err != nil { // it serves
		t.Fatal(err)
	}
	if err := r.ClaimHome(t.Context(), Store{[16]byte{1}, 3, false}); err != nil { // and goes on
		t.Fatal(err)
	}
	if err := copied.CompareHome(t.Context(), Store{[16]byte{1}, 2, false}); !errors.Is(err, ErrNotHome) {
		t.Errorf("a copy older than the last claim: %v", err)
	}
	serves(copied, Store{[16]byte{1}, 3, false})
	if err := <-ended; !errors.Is(err, ErrHomeMoved) {
		t.Errorf("the original ended with %v", err)
	}
	if err := r.ClaimHome(t.Context(), Store{[16]byte{1}, 4, false}); !errors.Is(err, ErrHomeMoved) {
		t.Errorf("the original claims again: %v", err)
	}
}

func TestConfigNamesWhatIsWrong(t *testing.T) {
	if _, err := Open(t.Context(), DefaultConfig()); err == nil || !strings.Contains(err.Error(), "endpoints: none; allowed: at least one") {
		t.Errorf("neither folder nor endpoints: %v", err)
	}
	cfg := DefaultConfig()
	cfg.Prefix, cfg.LeaseTTL, cfg.MaxIncarnations, cfg.CertFile = "x", 1500*time.Millisecond, 0, "c.pem"
	err := cfg.Validate()
	for _, want := range []string{
		`prefix: "x"; allowed: `, "lease_ttl: 1.5s; allowed: 2s to 1h", "max_incarnations: 0; allowed: 1 to 1000000",
		"cert_file: c.pem; allowed: only with endpoints",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

// The embedded server: what it was told survives its restart, it has no network
// listener, and closing it leaves no goroutine of ours behind.
func TestEmbedded(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	cfg := testConfig(t)
	cfg.Endpoints, cfg.Dir = nil, filepath.Join(t.TempDir(), "etcd")
	w := start(t, cfg)
	if n := len(w.server.etcd.Peers); n != 0 {
		t.Errorf("%d peer listeners", n)
	}
	for _, l := range w.server.etcd.Clients {
		if l.Addr().Network() != "unix" {
			t.Errorf("listens on %v", l.Addr())
		}
	}
	info, err := os.Stat(cfg.Dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("data folder: %v, %v; want mode 0700", info.Mode(), err)
	}
	w.register("gw", inc(1)).Close()
	w.register("gw", inc(2)).Close()
	if _, err := Open(t.Context(), cfg); !errors.Is(err, ErrInUse) {
		t.Errorf("a second server in the same folder: %v", err)
	}
	w.stop()

	w = start(t, cfg)
	defer w.stop()
	if _, err := w.Register(t.Context(), "gw", inc(1)); finalState(err) != authority.Superseded {
		t.Errorf("after a restart: %v", err)
	}
}

// An external etcd with users: one that may only use our prefix is enough, a
// wrong password is refused.
func TestCredentials(t *testing.T) {
	dir := t.TempDir()
	srv, admin, err := startEmbedded(t.Context(), dir, 64<<20, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer srv.close()
	defer admin.Close()
	cfg := testConfig(t)
	cfg.Endpoints = []string{"unix://" + filepath.Join(dir, SocketName)}
	cfg.Username, cfg.PasswordFile = "stipend", filepath.Join(dir, "password")
	ctx := t.Context()
	setUp := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	setUp(nil, os.WriteFile(cfg.PasswordFile, []byte("secret\n"), 0o600))
	setUp(admin.UserAdd(ctx, "root", "r"))
	setUp(admin.UserGrantRole(ctx, "root", "root"))
	setUp(admin.UserAdd(ctx, "stipend", "secret"))
	setUp(admin.RoleAdd(ctx, "stipend"))
	setUp(admin.RoleGrantPermission(ctx, "stipend", cfg.Prefix, clientv3.GetPrefixRangeEnd(cfg.Prefix), clientv3.PermissionType(clientv3.PermReadWrite)))
	setUp(admin.UserGrantRole(ctx, "stipend", "stipend"))
	setUp(admin.AuthEnable(ctx))

	w := start(t, cfg)
	defer w.stop()
	w.register("gw", inc(1)).Close()
	w.lookAtHealth(ctx)
	if s := w.Status(); s != (Status{}) {
		t.Errorf("status %+v", s)
	}
	setUp(nil, os.WriteFile(cfg.PasswordFile, []byte("wrong"), 0o600))
	if r, err := Open(ctx, cfg); err == nil {
		r.Close()
		t.Error("a wrong password was let in")
	}
}

// A full database is a state with a name, refuses with ErrNoSpace, and the
// embedded server is made well again when there is something to throw away.
func TestNoSpace(t *testing.T) {
	cfg := testConfig(t)
	cfg.Endpoints, cfg.Dir, cfg.QuotaBytes = nil, filepath.Join(t.TempDir(), "etcd"), 16<<20
	w := start(t, cfg)
	junk := strings.Repeat("x", 1<<20)
	var err error
	for range 64 { // the same key: history to throw away
		if _, err = w.client.Put(t.Context(), "junk", junk); err != nil {
			break
		}
	}
	if err == nil {
		t.Fatal("the quota was never reached")
	}
	_, err = w.Register(t.Context(), "gw", inc(1))
	if !errors.Is(err, ErrNoSpace) || !w.Status().NoSpace {
		t.Fatalf("register in a full database: %v, %+v", err, w.Status())
	}
	w.lookAtHealth(t.Context())
	if s := w.Status(); s.NoSpace || s.Err != "" {
		t.Errorf("after reclaiming: %+v", s)
	}
}
