package demo

import (
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

// steadily is records of the hot tenant at exactly its limit, 1 unit each,
// decided 1 ms before they are noted, after a burst.
func steadily(burst int, length time.Duration) []forwarded {
	var out []forwarded
	for range burst {
		out = append(out, forwarded{at: grant.Instant(time.Millisecond), tenant: 0, cost: 1})
	}
	for at := time.Second / hotRate; at <= length; at += time.Second / hotRate {
		i := grant.Instant(at + time.Millisecond)
		out = append(out, forwarded{at: i, sent: i.Add(-time.Millisecond), tenant: 0, cost: 1})
	}
	return out
}

// TestVerdictTurns proves that the verdict can be both: one unit more than the
// burst, the wallets and the time between decision and record allow breaks it.
func TestVerdictTurns(t *testing.T) {
	p := synthetic(20 * time.Second)
	most := hotBurst + owners*hotQuantum
	// A closed interval from the burst on holds it and one unit for each 2.5 ms;
	// 1 ms of r is 0.4 units, r*(1+rho) over 20 s adds 8.
	held, err := p.atBackend(steadily(most, 2*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if !held.held || held.tenants[0].Most != grant.Units(most) || held.tenants[0].Slack != grant.Units(most) {
		t.Errorf("exactly B + N*q: %+v", held.tenants[0])
	}
	broken, err := p.atBackend(steadily(most+1, 2*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if broken.held || broken.tenants[0].Over != 1 {
		t.Errorf("one more: %+v", broken.tenants[0])
	}
	// The same records, had one been on its way for 10 ms: r*10 ms is 4 units.
	late := steadily(most+1, 2*time.Second)
	late[len(late)-1].sent = late[len(late)-1].at.Add(-10 * time.Millisecond)
	if excused, err := p.atBackend(late); err != nil || !excused.held || excused.tenants[0].Within != 10*time.Millisecond {
		t.Errorf("one was on its way for 10 ms: %v, %+v", err, excused.tenants[0])
	}
}

// TestVerdictNamesTheWorst proves that a broken tenant comes first, however
// small it is.
func TestVerdictNamesTheWorst(t *testing.T) {
	p := synthetic(20 * time.Second)
	records := steadily(hotBurst+owners*hotQuantum, time.Second)
	last := records[len(records)-1].at
	for range 2*coldRate + 1 {
		records = append(records, forwarded{at: last, sent: last, tenant: 5, cost: 1})
	}
	got, err := p.atBackend(records)
	if err != nil {
		t.Fatal(err)
	}
	if got.held || got.tenants[0].Tenant != string(p.tenants[5].id) || got.tenants[0].Over != 1 {
		t.Errorf("%+v", got.tenants)
	}
	res := &Result{Held: got.held, Kept: true, Backend: got.tenants}
	if res.OK() {
		t.Error("a broken bound passes")
	}
	var b strings.Builder
	if err := res.Write(&b); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "BOUND BROKEN") || !strings.Contains(b.String(), string(p.tenants[5].id)) {
		t.Errorf("the text does not name the tenant:\n%s", &b)
	}
}

// TestAgentsRecords proves that the agents' files are judged as one, that a
// file of a killed agent counts as torn, and that a tenant of no policy breaks.
func TestAgentsRecords(t *testing.T) {
	p := synthetic(20 * time.Second)
	dir := t.TempDir()
	file := func(name string, ends bool, records ...trace.Record) string {
		path := filepath.Join(dir, name)
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		w, err := trace.NewWriter(f, trace.WriterConfig{Header: trace.Header{Recorder: name, Clock: "monotonic:x"}, Buffer: 1 << 20, Every: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			if err := w.Append(r); err != nil {
				t.Fatal(err)
			}
		}
		if ends {
			err = w.Close()
		} else {
			err = w.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	half := trace.Record{At: 1, Tenant: "hot", Class: "read", Cost: 200, Path: trace.Local}
	a, b := file("a", true, half), file("b", false, half)
	one, err := p.byAgents([]string{a}, 0)
	if err != nil || !one.held || one.torn != 0 {
		t.Errorf("one file: %v, %+v", err, one)
	}
	both, err := p.byAgents([]string{a, b}, 0)
	if err != nil || both.held || both.tenants[0].Over != 80 || both.torn != 1 {
		t.Errorf("both files: %v, %+v", err, both)
	}
	stranger := file("c", true, trace.Record{At: 1, Tenant: "nobody", Class: "read", Cost: 1, Path: trace.Local})
	got, err := p.byAgents([]string{stranger}, 0)
	if err != nil || got.held {
		t.Errorf("a tenant without a policy: %v, %+v", err, got)
	}
}

// TestUtilisation proves that the share is of r*T between the first refusal
// and the end, and that a load that never was refused has none.
func TestUtilisation(t *testing.T) {
	p := synthetic(20 * time.Second)
	records := steadily(500, 20*time.Second)
	from, until := grant.Instant(2*time.Second), grant.Instant(12*time.Second)
	u, err := p.utilisation(records, from, until)
	if err != nil || !u.Kept || u.Of != 10*hotRate || u.PPM < 999_000 || u.PPM > 1_001_000 {
		t.Errorf("%v, %+v", err, u)
	}
	var fewer []forwarded
	for i, r := range records {
		if i%25 != 0 { // 96 %
			fewer = append(fewer, r)
		}
	}
	if u, err = p.utilisation(fewer, from, until); err != nil || u.Kept || u.PPM > 965_000 || u.PPM < 955_000 {
		t.Errorf("%v, %+v", err, u)
	}
	if _, err = p.utilisation(records, 0, until); err == nil {
		t.Error("a load that was never refused is judged")
	}
}

// TestPromise proves that the hot tenant's policy is one for which 97 % are
// promised, with the round trips of a busy machine.
func TestPromise(t *testing.T) {
	p := synthetic(20 * time.Second)
	if promise := bounds.PromiseOf(p.tenants[0].policy, 30*time.Millisecond); !promise.Full() {
		t.Errorf("%+v", promise)
	}
	for _, one := range p.tenants {
		if faults := one.policy.Validate(); len(faults) > 0 {
			t.Errorf("%s: %v", one.id, faults)
		}
	}
}

// TestReference proves that the one bucket for all is a token bucket: compared
// with exact rationals.
func TestReference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		policy := &grant.Policy{
			Rate:  grant.Rate{Units: grant.Units(rapid.Int64Range(0, 1000).Draw(t, "units")), Per: time.Duration(rapid.Int64Range(1, 10_000).Draw(t, "per"))},
			Burst: grant.Units(rapid.Int64Range(0, 1000).Draw(t, "burst")),
		}
		var arrivals []arrival
		at := time.Duration(0)
		for range rapid.IntRange(0, 50).Draw(t, "n") {
			at += time.Duration(rapid.Int64Range(0, 20_000).Draw(t, "gap"))
			arrivals = append(arrivals, arrival{at: at, cost: grant.Units(rapid.Int64Range(0, 300).Draw(t, "cost"))})
		}
		burst := new(big.Rat).SetInt64(int64(policy.Burst))
		level, last := new(big.Rat).Set(burst), time.Duration(0)
		var admitted, refused grant.Units
		for _, a := range arrivals {
			level.Add(level, new(big.Rat).SetFrac64(int64(policy.Rate.Units)*int64(a.at-last), int64(policy.Rate.Per)))
			if last = a.at; level.Cmp(burst) > 0 {
				level.Set(burst)
			}
			if cost := new(big.Rat).SetInt64(int64(a.cost)); cost.Cmp(level) <= 0 {
				level.Sub(level, cost)
				admitted += a.cost
			} else {
				refused += a.cost
			}
		}
		if a, r := reference(policy, arrivals); a != admitted || r != refused {
			t.Fatalf("admitted %d, refused %d; want %d, %d", a, r, admitted, refused)
		}
	})
}
