package daemon

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stipend/stipend/authority/membership"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// A store is created only when the start is said to be the first, and where
// nothing was before; a first start that was cut off before the store became the
// home is begun again in the same way.
func TestFirstStart(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	cfg := testConfig(data)
	store := filepath.Join(data, "store")
	start := func(first bool) (*running, error) {
		cfg.Init = first
		return begin(t, cfg)
	}
	refused := func(what string, first bool, want error, text string) {
		t.Helper()
		if _, err := start(first); !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
			t.Fatalf("%s, init %v: %v", what, first, err)
		}
	}
	const hint = "If this is the first start of a new installation, add --init once. If a disk was lost or replaced, run stipend recover."

	refused("a missing folder", false, ErrNoStore, "no store in "+store+". "+hint)
	if _, err := os.Stat(data); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the refused start left %s: %v", data, err)
	}
	registry, err := membership.Open(t.Context(), cfg.etcd())
	if err == nil {
		err = registry.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	refused("no store under a fresh etcd", false, ErrNoStore, "no store in "+store+". "+hint)
	made, err := pebblestore.Create(cfg.store())
	if err == nil {
		err = made.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	refused("a store that never served", false, ErrNoStore, hint)

	r, err := start(true)
	must(t, r, err)
	if err := r.end(); err != nil {
		t.Fatal(err)
	}
	refused("the home", true, ErrInit, "there is a store already: leave out --init")
	r, err = start(false)
	must(t, r, err)
}

// The whole folder is lost, with the home that its etcd remembered: a start
// creates nothing, and recovery makes a store that has no policies, no levels
// and grants nothing for the time given.
func TestLossOfTheWholeFolder(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	cfg := testConfig(data)
	r, err := begin(t, cfg)
	must(t, r, err)
	r.put("t", slowPolicy())
	a := r.mustLink("gw", grant.NewIncarnation())
	if got := a.ask(a.request("t", 1, 20, 0)); got.Result != granted {
		t.Fatalf("grant: %v", got)
	}
	a.leave()
	if err := r.end(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(data); err != nil {
		t.Fatal(err)
	}
	cfg.Init = false
	if _, err := begin(t, cfg); !errors.Is(err, ErrNoStore) || !strings.Contains(err.Error(), "run stipend recover") {
		t.Fatalf("a start without the folder: %v", err)
	}
	if _, err := Recover(t.Context(), cfg, time.Minute); err != nil {
		t.Fatal(err)
	}
	r, err = begin(t, cfg)
	must(t, r, err)
	if _, err := r.inspect.GetTenant(ctxOf(t), &stipendv1.GetTenantRequest{Tenant: "t"}); status.Code(err) != codes.NotFound {
		t.Errorf("the lost policy: %v", err)
	}
	r.put("t", slowPolicy())
	if level := r.tenant("t").Ordinary.Level; level != 0 {
		t.Errorf("level %d after recovery, want 0", level)
	}
	b := r.mustLink("gw", grant.NewIncarnation())
	if got := b.ask(b.request("t", 1, 20, 0)); got.Result == granted {
		t.Errorf("a grant after recovery: %v", got)
	}
	b.leave()
}

// The home test in the daemon: an empty disk, a second store and a restored
// backup do not serve; Recover makes them, with all levels at 0 and no grants.
func TestHomeAndRecover(t *testing.T) {
	dir := t.TempDir()
	cfg := testConfig(dir)
	store := filepath.Join(dir, "store")
	backup := filepath.Join(t.TempDir(), "backup")
	stop := func(r *running) {
		t.Helper()
		if err := r.end(); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(what string) {
		t.Helper()
		_, err := begin(t, cfg)
		if !errors.Is(err, membership.ErrNotHome) || !strings.Contains(err.Error(), "stipend recover") {
			t.Fatalf("%s: %v", what, err)
		}
	}
	r, err := begin(t, cfg)
	must(t, r, err)
	r.put("t", slowPolicy())
	stop(r)
	cfg.Init = false
	if err := os.CopyFS(backup, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	r, err = begin(t, cfg)
	must(t, r, err)
	a := r.mustLink("gw", grant.NewIncarnation())
	a.ask(a.request("t", 1, 20, 0))
	a.leave()
	stop(r)

	if err := os.Rename(store, store+".lost"); err != nil {
		t.Fatal(err)
	}
	refused("an empty disk")
	cfg.Init = true
	refused("an empty disk that is said to be the first")
	cfg.Init = false
	if err := os.CopyFS(store, os.DirFS(backup)); err != nil {
		t.Fatal(err)
	}
	refused("a restored backup")
	if err := os.Rename(filepath.Join(dir, "etcd"), filepath.Join(dir, "etcd.lost")); err != nil {
		t.Fatal(err)
	}
	refused("a store with records under an empty etcd")
	cfg.Init = true
	refused("such a store, said to be the first")
	cfg.Init = false

	if _, err := Recover(t.Context(), cfg, 9*time.Second); err == nil || !strings.Contains(err.Error(), `tenant "t" in this store has a ttl of 10s`) {
		t.Errorf("recovery with less than the ttl of a policy on the disk: %v", err)
	}
	refused("a store whose recovery was refused")
	if _, err := Recover(t.Context(), cfg, time.Minute); err != nil {
		t.Fatal(err)
	}
	r, err = begin(t, cfg)
	must(t, r, err)
	if level := r.tenant("t").Ordinary.Level; level != 0 {
		t.Errorf("level %d after recovery, want 0", level)
	}
	b := r.mustLink("gw", grant.NewIncarnation())
	if got := b.ask(b.request("t", 1, 20, 0)); got.Result == granted {
		t.Errorf("a grant after recovery: %v", got)
	}
	b.leave()
	stop(r)
}

// A second authority on the ports of the first is told which setting to change.
func TestAddressInUse(t *testing.T) {
	r := sharedDaemon(t)
	for setting, at := range map[string]net.Addr{"listen": r.at.GRPC, "http": r.at.HTTP} {
		cfg := testConfig(t.TempDir())
		if setting == "listen" {
			cfg.Listen = at.String()
		} else {
			cfg.HTTP = at.String()
		}
		if _, err := begin(t, cfg); err == nil || !strings.Contains(err.Error(), "address already in use: is another authority running? Stop it, or change --"+setting) {
			t.Errorf("%s: %v", setting, err)
		}
	}
}

// A running authority's folder is refused to recovery: nothing is touched.
func TestRecoverWhileRunning(t *testing.T) {
	r := sharedDaemon(t)
	r.put("running", slowPolicy())
	cfg := testConfig(sharedDir)
	if _, err := Recover(t.Context(), cfg, time.Minute); !errors.Is(err, membership.ErrInUse) {
		t.Errorf("recovery under a running authority: %v", err)
	}
	if level := r.tenant("running").Ordinary.Level; level != 100 {
		t.Errorf("level %d", level)
	}
}
