package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := command()
	cmd.SetOut(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

// What --print-config prints is a file that brings the same settings; flags win
// over the environment, the environment over the file.
func TestPrintConfig(t *testing.T) {
	first, err := run(t, "--data", "d", "--listen", "127.0.0.1:9", "--print-config")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "authority.yaml")
	if err := os.WriteFile(file, []byte(first), 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := run(t, "--config", file, "--print-config")
	if err != nil || again != first {
		t.Errorf("%v\n%s\nis not\n%s", err, again, first)
	}
	t.Setenv("STIPEND_LISTEN", "127.0.0.1:10")
	t.Setenv("STIPEND_DATA", "from-environment")
	mixed, err := run(t, "--config", file, "--data", "from-flag", "--print-config")
	if err != nil || !strings.Contains(mixed, "listen: 127.0.0.1:10\n") || !strings.Contains(mixed, "data: from-flag\n") {
		t.Errorf("%v\n%s", err, mixed)
	}
}

// Case 29: faults are named with file, line and key, all at once, and nothing starts.
func TestCase29FaultyConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "authority.yaml")
	text := "data: d\nlistn: 127.0.0.1:1\nledger:\n  max_inbox: 0\netcd:\n  lease_ttl: 1s\ngc_percent: 1.5\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := run(t, "--config", file)
	for _, want := range []string{":2:", "listn", ":4:", "ledger.max_inbox", ":6:", "etcd.lease_ttl", ":7:", "gc_percent"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\ndoes not say %q", err, want)
		}
	}
}

// --init is a flag and no setting: the file that --print-config writes does not
// hold it, and a file or the environment cannot say it.
func TestInitIsNoSetting(t *testing.T) {
	out, err := run(t, "--data", "d", "--init", "--print-config")
	if err != nil || strings.Contains(out, "init") {
		t.Errorf("%v\n%s", err, out)
	}
	data := filepath.Join(t.TempDir(), "data")
	t.Setenv("STIPEND_INIT", "true")
	_, err = run(t, "--data", data, "--listen", "127.0.0.1:0", "--http", "")
	if err == nil || !strings.Contains(err.Error(), "no store in "+filepath.Join(data, "store")+". If this is the first start of a new installation, add --init once.") {
		t.Errorf("without the flag: %v", err)
	}
	file := filepath.Join(t.TempDir(), "authority.yaml")
	if err := os.WriteFile(file, []byte("data: d\ninit: true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = run(t, "--config", file); err == nil || !strings.Contains(err.Error(), "init: is no known key") {
		t.Errorf("in a file: %v", err)
	}
}

// The help teaches: what it is, how it is started, where settings come from.
func TestHelp(t *testing.T) {
	out, err := run(t, "--help")
	for _, want := range []string{"--data ./authority --init", "STIPEND_LISTEN", "stipend recover", "--tls-client-ca"} {
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%v: the help does not say %q", err, want)
		}
	}
}
