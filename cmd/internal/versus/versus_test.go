package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestSeries(t *testing.T) {
	for _, c := range []struct {
		s      series
		median float64
		text   string
	}{
		{nil, 0, "-"},
		{series{7}, 7, "7.0"},
		{series{9, 1, 5}, 5, "5.0 (1.0-9.0)"},
		{series{4, 1, 3, 2}, 2.5, "2.5 (1.0-4.0)"},
	} {
		if c.s.median() != c.median || c.s.text("%.1f") != c.text {
			t.Errorf("%v: median %v, %q; want %v, %q", c.s, c.s.median(), c.s.text("%.1f"), c.median, c.text)
		}
	}
	// By pairs: not the ratio of the medians, which is 1 here.
	if got := (series{1, 4, 9}).over(series{2, 4, 3}).median(); got != 1 {
		t.Errorf("median of ratios %v", got)
	}
	if got := (series{2, 8, 30}).over(series{1, 2, 3}).text("%.0f"); got != "4 (2-10)" {
		t.Errorf("ratios %s", got)
	}
}

// A quantile by nearest rank is a value of the sample with at least q of the
// sample at or below it, and the smallest such value.
func TestQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 300).Draw(t, "n")
		sorted := make([]int64, n)
		for i := range sorted {
			sorted[i] = int64(i)
		}
		percent := rapid.IntRange(1, 100).Draw(t, "percent")
		got := quantile(sorted, float64(percent)/100)
		if (got+1)*100 < int64(percent*n) {
			t.Fatalf("%d %% of %d: %d is too small", percent, n, got)
		}
		if got > 0 && got*100 >= int64(percent*n) {
			t.Fatalf("%d %% of %d: %d is too large", percent, n, got)
		}
	})
	if quantile(nil, 0.5) != 0 {
		t.Error("of nothing")
	}
}

func TestTableLinesUp(t *testing.T) {
	tab := newTable("what", "µs")
	tab.row("a long name", "1")
	tab.row("b", "12345")
	var out bytes.Buffer
	tab.print(&out)
	want := "| what        |    µs |\n| ----------- | ----: |\n| a long name |     1 |\n| b           | 12345 |\n"
	if out.String() != want {
		t.Errorf("got\n%s", out.String())
	}
}

func TestParseBench(t *testing.T) {
	got, err := parseBench(`goos: linux
BenchmarkTake-2          	12345678	        61.50 ns/op	       0 B/op	       0 allocs/op
BenchmarkDecide/admit/alone-2 	1000	 90 ns/op	 1 allocs/op
BenchmarkGrants/a-b 	10	 5 ns/op	 7.5 grants/s
PASS
`)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got["BenchmarkTake"]["ns/op"] != 61.5 || got["BenchmarkTake"]["allocs/op"] != 0 ||
		got["BenchmarkDecide/admit/alone"]["allocs/op"] != 1 || got["BenchmarkGrants/a-b"]["grants/s"] != 7.5 {
		t.Errorf("%v", got)
	}
	if _, err := parseBench("BenchmarkX 1 many ns/op\n"); err == nil {
		t.Error("a value that is no number was read")
	}
}

func TestParseStrace(t *testing.T) {
	got, err := parseStrace(`% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 70.00    0.000700           7       100        10 futex
 30.00    0.000300           3        20           clock_gettime
------ ----------- ----------- --------- --------- ----------------
100.00    0.001000           8       120        10 total
`)
	if err != nil || got["futex"] != 100 || got["clock_gettime"] != 20 || got["total"] != 120 {
		t.Errorf("%v %v", got, err)
	}
	if _, err := parseStrace("nothing\n"); err == nil {
		t.Error("a summary without a total was read")
	}
}

func TestConfigNamesTheField(t *testing.T) {
	good := config{Pairs: 1, Turn: time.Second, Callers: 64, Tenants: 1}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for field, bad := range map[string]config{
		"only":    {Only: "checks,chekcs", Pairs: 1, Turn: time.Second, Callers: 64, Tenants: 1},
		"pairs":   {Turn: time.Second, Callers: 64, Tenants: 1},
		"turn":    {Pairs: 1, Callers: 64, Tenants: 1},
		"callers": {Pairs: 1, Turn: time.Second, Callers: 1025, Tenants: 1},
		"tenants": {Pairs: 1, Turn: time.Second, Callers: 64},
	} {
		if err := bad.Validate(); err == nil || !strings.HasPrefix(err.Error(), field+": ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// What /proc says of a process is of that process and grows with what it uses.
func TestProcessUsage(t *testing.T) {
	u, err := processUsage(os.Getpid())
	if err != nil {
		t.Skipf("no /proc as Linux has it: %v", err)
	}
	if u.RSS < 1<<20 || u.RSS > 1<<40 {
		t.Errorf("this process is said to hold %d bytes", u.RSS)
	}
	if own := ownCPU(); u.CPU > own+time.Second {
		t.Errorf("/proc says %v of CPU, getrusage %v", u.CPU, own)
	}
	if _, err := processUsage(-1); err == nil {
		t.Error("no process was found and no error told")
	}
}

func TestFolderBytes(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "in"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, n := range map[string]int{"a": 10, "in/b": 32} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := folderBytes(dir); err != nil || n != 42 {
		t.Errorf("%d %v", n, err)
	}
	if _, err := folderBytes(filepath.Join(dir, "not there")); err == nil {
		t.Error("a folder that is not there has a size")
	}
}

// The log of a child keeps its end, whatever its length.
func TestLogTail(t *testing.T) {
	var l logTail
	for range 3 * tailBytes / 7 {
		if n, err := l.Write([]byte("noise..")); n != 7 || err != nil {
			t.Fatal(n, err)
		}
	}
	_, _ = l.Write([]byte("the end"))
	if s := l.String(); len(s) != tailBytes || !strings.HasSuffix(s, "..the end") {
		t.Errorf("%d bytes, ending in %q", len(s), s[len(s)-20:])
	}
}

// Every caller has a tenant of its own, and no two callers share a partition.
func TestPartitionTenants(t *testing.T) {
	got := partitionTenants(64)
	seen := map[string]bool{}
	for c, tenant := range got {
		if seen[string(tenant)] || tenant == "" {
			t.Errorf("caller %d: %q", c, tenant)
		}
		seen[string(tenant)] = true
	}
}

// The peer's bucket is a right one: it admits its burst, then refuses, and
// refills by the elapsed time; otherwise the comparison would mean nothing.
func TestPeersBucket(t *testing.T) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Skip("redis-server is not installed")
	}
	r := &run{config: config{Callers: 4}, dir: t.TempDir()}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := startRedis(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}()
	ask := func(key string, rate, burst, cost int) int {
		n, err := s.client.EvalSha(ctx, s.sha, []string{key}, rate, burst, cost).Int()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for i := range 10 {
		if ask("slow", 0, 10, 1) != 1 {
			t.Fatalf("ask %d of a burst of 10 was refused", i)
		}
	}
	if ask("slow", 0, 10, 1) != 0 || ask("slow", 0, 10, 0) != 1 {
		t.Error("an empty bucket paid, or refused to look")
	}
	// Had it been full 3 s ago and drained, 3 s of refill are there now.
	now, err := s.client.Time(ctx).Result()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.client.HSet(ctx, "refills", "m", 0, "t", now.Add(-3*time.Second).UnixMicro()).Err(); err != nil {
		t.Fatal(err)
	}
	if ask("refills", 1000, 1_000_000, 3000) != 1 {
		t.Error("3 s at 1000/s did not refill 3000 units")
	}
	if ask("refills", 1000, 1_000_000, 1_000_000) != 0 {
		t.Error("units came from nowhere")
	}
}
