package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/authority/daemon"
)

// running is a real authority, in this process: daemon.Run on port 0.
type running struct {
	t    *testing.T
	cfg  daemon.Config
	addr string
	stop func()
}

func startAuthority(t *testing.T, dir string) *running {
	t.Helper()
	cfg := daemon.DefaultConfig()
	cfg.Listen, cfg.HTTP, cfg.Data = "127.0.0.1:0", "", dir
	cfg.Store.MinFreeBytes = 0
	_, err := os.Stat(filepath.Join(dir, "etcd"))
	cfg.Init = os.IsNotExist(err)
	cfg.Logger = slog.New(slog.DiscardHandler)
	at := make(chan daemon.Addresses, 1)
	cfg.Ready = func(a daemon.Addresses) { at <- a }
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- daemon.Run(ctx, cfg) }()
	a := &running{t: t, cfg: cfg}
	select {
	case addrs := <-at:
		a.addr = addrs.GRPC.String()
	case err := <-ended:
		cancel()
		t.Fatalf("the authority did not start: %v", err)
	}
	stopped := false
	a.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the authority ended with %v", err)
		}
	}
	t.Cleanup(a.stop)
	return a
}

// call runs the command against the authority.
func (a *running) call(code int, args ...string) (stdout, stderr string) {
	a.t.Helper()
	return a.pipe("", code, args...)
}

func (a *running) pipe(in string, code int, args ...string) (stdout, stderr string) {
	a.t.Helper()
	var out, errOut bytes.Buffer
	got := run(context.Background(), append(args, "--authority", a.addr), strings.NewReader(in), &out, &errOut)
	if got != code {
		a.t.Fatalf("stipend %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got, code, &out, &errOut)
	}
	return out.String(), errOut.String()
}

func wants(t *testing.T, text string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile("(?m)" + p).MatchString(text) {
			t.Errorf("no %q in\n%s", p, text)
		}
	}
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const twoTenants = `
plans:
  pro:
    rate: 600 per 1m
    burst: 200
    classes: {read: 1, write: {cost: 5, central: true}}
    grant: {quantum: 2, owners: 4, ttl: 60s}
tenants:
  acme: {plan: pro, burst: 400}
  zoo: {plan: pro}
`

// TestPolicyCommands proves that policies go in as files and come out as the
// same files, that nothing is overwritten unseen, and what refusals say.
func TestPolicyCommands(t *testing.T) {
	if testing.Short() {
		t.Skip("starts an authority with its etcd")
	}
	a := startAuthority(t, t.TempDir())
	file := write(t, "policies.yaml", twoTenants)

	out, _ := a.call(0, "policy", "list")
	wants(t, out, `^no policies; stipend policy apply -f FILE sets some$`)

	out, _ = a.call(0, "policy", "apply", "-f", file, "--dry-run")
	wants(t, out, `^TENANT +VERSION +WHAT$`, `^acme +- +would be created$`, `^zoo +- +would be created$`)
	_, errOut := a.call(1, "policy", "get", "acme")
	wants(t, errOut, `tenant "acme" has no policy; stipend policy list shows the tenants`)

	out, _ = a.call(0, "policy", "apply", "-f", file)
	wants(t, out, `^acme +1 +created$`, `^zoo +1 +created$`)
	out, _ = a.call(0, "policy", "apply", "-f", file)
	wants(t, out, `^acme +1 +unchanged$`)

	// What get shows is a file that apply takes and finds unchanged.
	out, _ = a.call(0, "policy", "get", "acme")
	wants(t, out, `^# tenant "acme", version 1$`, `^    burst: 400$`, `made_from: pro`)
	again, _ := a.pipe(out, 0, "policy", "apply", "-f", "-")
	wants(t, again, `^acme +1 +unchanged$`)
	changed := strings.Replace(out, "burst: 400", "burst: 300", 1)
	_, errOut = a.pipe(changed, 1, "policy", "apply", "-f", "-", "--expect-version", "7")
	wants(t, errOut, `has version 1, expected was 7: somebody changed it meanwhile; look at it with stipend policy get`)
	_, errOut = a.pipe(changed, 1, "policy", "apply", "-f", "-", "--expect-version", "7", "--dry-run")
	wants(t, errOut, `has version 1, expected was 7`)
	out, _ = a.pipe(changed, 0, "policy", "apply", "-f", "-", "--expect-version", "1")
	wants(t, out, `^acme +2 +changed$`)

	// JSON is one document, with the same numbers.
	out, _ = a.call(0, "policy", "get", "acme", "-o", "json")
	var got tenantPolicyJSON
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	if got.Version != 2 || got.Policy.Burst != 300 || got.Policy.Rate != "600 per 1m" || got.Policy.Grant.Owners != 4 || !got.Policy.Classes["write"].Central {
		t.Errorf("policy get -o json: %s", out)
	}

	// Lists come in pages, and all pages by default.
	out, _ = a.call(0, "policy", "list")
	wants(t, out, `^acme +2 +enforce +pro +600 per 1m +300 +4 +2 +1m +2$`, `^zoo +1 +enforce`)
	seen := map[string]bool{}
	for page := ""; ; {
		out, _ = a.call(0, "policy", "list", "--page-size", "1", "--page", page, "-o", "json")
		var list struct {
			Policies []tenantPolicyJSON `json:"policies"`
			Next     string             `json:"next_page"`
		}
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			t.Fatal(err)
		}
		for _, p := range list.Policies {
			if seen[p.Tenant] {
				t.Errorf("tenant %q is on two pages", p.Tenant)
			}
			seen[p.Tenant] = true
		}
		if page = list.Next; page == "" {
			break
		}
	}
	if len(seen) != 2 {
		t.Errorf("pages hold %v, want acme and zoo", seen)
	}
	_, errOut = a.call(2, "policy", "list", "--page-size", "5000")
	wants(t, errOut, `page_size: 5000; allowed: `)

	out, _ = a.call(0, "tenant", "show", "acme")
	wants(t, out, `^tenant "acme", policy version 2, partition \d+$`, `^  level +\d+ +units, of a burst of 300$`, `N\*q = 8`, `^mode enforce, plan pro$`, `^classes and their costs: read 1, write 5 \(central\)$`)
	out, _ = a.call(0, "tenant", "show", "acme", "-o", "json")
	wants(t, out, `^  "tenant": "acme",$`, `^    "mode": "enforce",$`, `"burst": 300,$`, `^  "last_refusals": \[\]$`)

	_, errOut = a.call(1, "policy", "delete", "zoo", "--expect-version", "9")
	wants(t, errOut, `somebody changed it meanwhile`)
	out, _ = a.call(0, "policy", "delete", "zoo")
	wants(t, out, `^zoo +2 +deleted$`)
	// Nobody ever spent of it: there is nothing to remember.
	_, errOut = a.call(1, "policy", "get", "zoo")
	wants(t, errOut, `tenant "zoo" has no policy`)
	out, _ = a.call(0, "policy", "list", "-o", "json")
	if strings.Contains(out, "zoo") {
		t.Errorf("a deleted tenant is listed:\n%s", out)
	}
	_, errOut = a.call(1, "tenant", "show", "nobody")
	wants(t, errOut, `tenant "nobody" has no policy`)
}

// TestRecover proves that recover refuses while the authority runs, and makes
// a new store the home after it, without the policies of the lost one.
func TestRecover(t *testing.T) {
	if testing.Short() {
		t.Skip("starts an authority with its etcd")
	}
	dir := t.TempDir()
	a := startAuthority(t, dir)
	a.call(0, "policy", "apply", "-f", write(t, "policies.yaml", twoTenants))
	a.stop()
	if err := os.RemoveAll(filepath.Join(dir, "store")); err != nil {
		t.Fatal(err)
	}
	cfg := a.cfg
	cfg.Ready = nil
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cfg.Init = false
	if err := daemon.Run(ctx, cfg); err == nil {
		t.Fatal("the authority served from an empty disk")
	}
	var out, errOut bytes.Buffer
	config := write(t, "authority.yaml", fmt.Sprintf("data: %s\nstore: {min_free_bytes: 0}\n", dir))
	if code := run(ctx, []string{"recover", "--config", config, "--no-grants-for", "1m", "--yes"}, nil, &out, &errOut); code != 0 {
		t.Fatalf("recover: exit code %d\n%s", code, &errOut)
	}
	wants(t, out.String(), `^the store \S+ in \S+ is the home now$`, `nothing is granted for 1m`)
	a = startAuthority(t, dir)
	list, _ := a.call(0, "policy", "list")
	wants(t, list, `^no policies`)
}
