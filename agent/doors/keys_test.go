package doors

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

func line(key string, tenant grant.TenantID) string {
	return fmt.Sprintf("sha256:%x %s\n", sha256.Sum256([]byte(key)), tenant)
}

// Case 29 for the key file: each fault is named with file and line, and a
// faulty file yields no keys at all.
func TestCase29KeyFaults(t *testing.T) {
	good := line("k1", "acme")
	for _, c := range []struct{ name, file, want string }{
		{"no tenant", good + strings.Fields(good)[0] + "\n", "f:2: tenant: is empty"},
		{"plain key", "secret acme\n", "f:1: the key is not sha256:"},
		{"short hash", "sha256:abcd acme\n", "f:1: the key is not sha256:"},
		{"not hexadecimal", "sha256:" + strings.Repeat("z", 64) + " acme\n", "f:1: the key is not sha256:"},
		{"twice", good + "# between\n" + good, "f:3: the key is on line 1 already"},
		{"half-written name", good + strings.TrimSuffix(line("k2", "beta"), "a\n"), "f:2: the line does not end"},
		{"half-written hash", good + "sha256:ab", "f:2: the line does not end"},
		{"empty", "", "f:1: the file holds no key"},
		{"comments only", "# nothing\n\n", "f:2: the file holds no key"},
		{"control character", line("k", "a\x01b"), "f:1: tenant:"},
		{"too long", line("k", grant.TenantID(strings.Repeat("x", 300))), "f:1: tenant: has 300 bytes"},
	} {
		if _, err := parseKeys("f", []byte(c.file)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", c.name, err, c.want)
		}
	}
	if _, err := parseKeys("f", []byte(strings.Repeat("bad\n", 1000))); strings.Count(err.Error(), "\n") > maxKeyErrors {
		t.Error("errors are not bounded")
	}
	ring, err := parseKeys("f", []byte("# keys\r\n\n"+line("k1", "acme")+strings.ReplaceAll(line("k2", "a b é"), "\n", "\r\n")+line("k3", "acme")))
	if err != nil || len(ring) != 3 {
		t.Fatalf("%d keys, %v", len(ring), err)
	}
	if got := ring[sha256.Sum256([]byte("k2"))]; got != "a b é" {
		t.Errorf("tenant of k2: %q", got)
	}
}

// Case 29: a symlink swapped under the file is followed; a faulty, half-written
// or missing file leaves the keys of before and says stale until it is mended.
func TestCase29KeysReload(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	link := filepath.Join(dir, "keys")
	swap := func(to string) {
		tmp := filepath.Join(dir, "tmp")
		if err := os.Symlink(to, tmp); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, link); err != nil {
			t.Fatal(err)
		}
	}
	swap(write("v1", line("k1", "acme")))
	k, err := OpenKeys(link)
	if err != nil {
		t.Fatal(err)
	}
	expect := func(what string, changed, stale bool, keys ...string) {
		t.Helper()
		got, err := k.Reload()
		if s := k.State(); got != changed || s.Stale != stale || stale != (err != nil) {
			t.Errorf("%s: changed %v, stale %v, %v", what, got, s.Stale, err)
		}
		for _, key := range keys {
			if _, ok := k.tenant(key); !ok {
				t.Errorf("%s: %s is not known", what, key)
			}
		}
		if _, ok := k.tenant("other"); ok {
			t.Errorf("%s: an unknown key is known", what)
		}
	}
	expect("nothing new", false, false, "k1")
	swap(write("v2", line("k1", "acme")+line("k2", "beta")))
	expect("swapped", true, false, "k1", "k2")
	swap(write("v3", line("k3", "acme")+"oops\n"))
	expect("faulty", false, true, "k1", "k2")
	expect("still faulty", false, true, "k1", "k2")
	if e := k.State().Err; !strings.Contains(e, link+":2:") {
		t.Errorf("the error does not name file and line: %s", e)
	}
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	expect("missing", false, true, "k1", "k2")
	swap(write("v4", line("k3", "acme")))
	expect("mended", true, false, "k3")
	// The same size in the same file, a moment later.
	v4 := write("v4", line("k4", "acme"))
	if err := os.Chtimes(v4, time.Now(), time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	expect("rewritten", true, false, "k4")
	if _, err := OpenKeys(filepath.Join(dir, "none")); err == nil {
		t.Error("a first file may be missing")
	}
}

// Whatever the bytes are: no panic, and either errors or keys with valid
// tenants that are found by what is written in the file.
func FuzzParseKeys(f *testing.F) {
	f.Add([]byte(line("k1", "acme") + "# c\n" + line("k2", "b")))
	f.Add([]byte("sha256:"))
	f.Add([]byte("sha256:" + strings.Repeat("00", 32) + "\t x\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		ring, err := parseKeys("f", data)
		if err != nil {
			return
		}
		if len(ring) == 0 {
			t.Error("no error and no keys")
		}
		for k, tenant := range ring {
			if tenant.Validate() != nil || !strings.Contains(string(data), string(tenant)) {
				t.Errorf("%x maps to %q", k, tenant)
			}
		}
	})
}
