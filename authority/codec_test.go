package authority

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

type fixed map[string][]byte

func (f fixed) Load(_ grant.Partition, yield func(k, v []byte) error) error {
	keys := make([]string, 0, len(f))
	for k := range f {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		if err := yield([]byte(k), f[k]); err != nil {
			return err
		}
	}
	return nil
}

func (f fixed) Commit(_ grant.Partition, records []Record) error {
	for _, r := range records {
		if r.Value == nil {
			delete(f, string(r.Key))
		} else {
			f[string(r.Key)] = bytes.Clone(r.Value)
		}
	}
	return nil
}

// lively is a store with at least one record of every kind.
func lively(t testing.TB) fixed {
	s := fixed{"R": {0, 0, 0, 1, 0, 0, 0, 0}}
	n := NewNode(DefaultConfig(), 0)
	if err := n.Load(s, Reading{}); err != nil {
		t.Fatal(err)
	}
	at := Reading{}
	step := func(c Call) {
		if _, ok := n.Offer(c); !ok {
			t.Fatal("inbox full")
		}
		if r := n.Step(at); len(r) > 0 {
			n.Done(s.Commit(0, r))
		}
		n.Replies()
	}
	p := &grant.Policy{Plan: "gold", Rate: grant.Rate{Units: 100, Per: time.Second}, Burst: 50,
		Classes:   map[grant.RouteClass]grant.Class{"op": {Cost: 1, Emergency: true}, "dear": {Cost: 9, Central: true}},
		Grant:     grant.GrantSettings{Quantum: 10, Owners: 3, TTL: 10 * time.Second},
		Emergency: &grant.Emergency{Rate: grant.Rate{Units: 1, Per: time.Second}, Burst: 5, Grant: grant.GrantSettings{Quantum: 2, Owners: 2, TTL: time.Minute}}}
	step(Call{Put: &PutPolicy{Tenant: "a", Policy: p, AnyVersion: true}})
	step(Call{Put: &PutPolicy{Tenant: "b", Policy: p, AnyVersion: true}})
	inc, gone := grant.Incarnation{1}, grant.Incarnation{2}
	step(Call{Member: &Member{Incarnation: inc, Owner: "gw", State: Live}})
	step(Call{Member: &Member{Incarnation: gone, Owner: "old", State: Fenced}})
	at = Reading{Mono: 60e9, Raw: 60e9}
	seq := uint64(0)
	check := func() {
		seq++
		r := &grant.CheckRequest{Tenant: "a", Class: "op", Count: 1, Attempt: grant.Attempt{Incarnation: inc, Seq: seq}}
		r.Sum = r.Fingerprint()
		step(Call{Check: r})
	}
	for _, emergency := range []bool{false, true} {
		r := &grant.GrantRequest{Tenant: "a", Incarnation: inc, Emergency: emergency, ID: 1, Want: 2, Min: 1}
		r.Sum = r.Fingerprint()
		step(Call{Grant: r})
	}
	check()
	at = Reading{Mono: 80e9, Raw: 80e9}
	check()
	step(Call{Put: &PutPolicy{Tenant: "b", AnyVersion: true}}) // full: only a version is left
	for _, k := range "BDLMOPRTV" {
		if !slices.ContainsFunc(sortedKeys(s), func(key string) bool { return key[0] == byte(k) }) {
			at = Reading{Mono: 81e9, Raw: 81e9}
			s.Commit(0, n.Close(at))
			break
		}
	}
	for _, k := range "BDLMOPRTV" {
		if !slices.ContainsFunc(sortedKeys(s), func(key string) bool { return key[0] == byte(k) }) {
			t.Fatalf("no record of kind %c", k)
		}
	}
	return s
}

func sortedKeys(s fixed) []string {
	keys := make([]string, 0, len(s))
	for k := range s {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// TestRecordsSurviveALoad: what one node wrote another one reads, and writes the
// same again.
func TestRecordsSurviveALoad(t *testing.T) {
	s := lively(t)
	first, err := load(DefaultConfig(), 0, s)
	if err != nil {
		t.Fatal(err)
	}
	for _, tn := range first.tenants {
		first.touchTenant(tn)
		for a := range tn.accounts {
			if a.stored {
				first.touch(tn, a)
			}
			if a.hot != nil {
				for inc, o := range a.hot.owners {
					first.touchOwner(tn, a, inc, o)
				}
			}
		}
	}
	for _, r := range first.seal() {
		if have, ok := s[string(r.Key)]; ok && !bytes.Equal(have, r.Value) {
			t.Errorf("record %q was %x, is written back as %x", r.Key, have, r.Value)
		}
	}
}

// FuzzLoad: whatever stands in a store, a load gives a sound ledger or an error.
func FuzzLoad(f *testing.F) {
	s := lively(f)
	for i, k := range sortedKeys(s) {
		f.Add(uint8(i), s[k], []byte(k))
	}
	f.Fuzz(func(t *testing.T, which uint8, value, newKey []byte) {
		s := lively(t)
		keys := sortedKeys(s)
		s[keys[int(which)%len(keys)]] = value
		s[string(newKey)] = value
		l, err := load(DefaultConfig(), 0, s)
		if err != nil {
			return
		}
		if err := l.Check(); err != nil {
			t.Fatal(err)
		}
		l.begin(l.now + 1e9)
		if err := l.Check(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestColdTenantMemory: a tenant that spent and is idle costs under 300 bytes,
// id and index included.
func TestColdTenantMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("allocates 100,000 tenants")
	}
	bytesEach, _ := coldTenants(t, 100_000)
	t.Logf("%d bytes per cold tenant", bytesEach)
	if bytesEach >= 300 {
		t.Errorf("%d bytes per cold tenant, want under 300", bytesEach)
	}
}

// coldTenants loads n tenants with a partly filled bucket each and measures
// what they hold of the heap.
func coldTenants(t testing.TB, n int) (bytesEach uint64, l *Ledger) {
	cfg := DefaultConfig()
	cfg.MaxTenants = n
	l = newLedger(cfg, 0)
	p := grant.Policy{Rate: grant.Rate{Units: 1, Per: time.Hour}, Burst: 100, Classes: map[grant.RouteClass]grant.Class{"op": {Cost: 1}}}
	before := inUse()
	for i := range n {
		c := p // equal content, another value
		res := &PutResult{}
		l.apply(&PutPolicy{Tenant: grant.TenantID(fmt.Sprintf("tenant-%08d", i)), Policy: &c}, res)
		if res.Reason != grant.None {
			t.Fatal(res.Reason)
		}
		r := &grant.CheckRequest{Tenant: res.Tenant, Class: "op", Count: 1, Attempt: grant.Attempt{Incarnation: grant.Incarnation{9}, Seq: uint64(i + 1)}}
		r.Tenant = grant.TenantID(fmt.Sprintf("tenant-%08d", i))
		r.Sum = r.Fingerprint()
		l.check(nil, r)
		if i%1000 == 0 {
			l.seal()
		}
	}
	l.seal()
	l.begin(l.now + grant.Instant(time.Minute)) // the window is over
	l.seal()
	l.dirtyTenants, l.dirtyAccounts, l.fresh = nil, nil, nil
	after := inUse()
	if len(l.decided) != 0 || l.buckets != n {
		t.Fatalf("%d decisions, %d buckets of %d tenants", len(l.decided), l.buckets, n)
	}
	runtime.KeepAlive(l)
	return (after - before) / uint64(n), l
}

func inUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkColdTenant reports the bytes of memory of one cold tenant.
func BenchmarkColdTenant(b *testing.B) {
	for range b.N {
		each, _ := coldTenants(b, 200_000)
		b.ReportMetric(float64(each), "B/tenant")
	}
}

// BenchmarkStep is what deciding costs without the store: one hot tenant, 64
// calls a step.
func BenchmarkStep(b *testing.B) {
	n := NewNode(DefaultConfig(), 0)
	s := fixed{}
	if err := n.Load(s, Reading{}); err != nil {
		b.Fatal(err)
	}
	p := &grant.Policy{Rate: grant.Rate{Units: 1e12, Per: time.Second}, Burst: 1e12, Classes: map[grant.RouteClass]grant.Class{"op": {Cost: 1}}}
	n.Offer(Call{Put: &PutPolicy{Tenant: "t", Policy: p}})
	n.Step(Reading{})
	n.Done(nil)
	n.Replies()
	b.ReportAllocs()
	caller := new(int)
	for i := 0; i < b.N; {
		for range 64 {
			i++
			r := &grant.CheckRequest{Tenant: "t", Class: "op", Count: 1, Attempt: grant.Attempt{Incarnation: grant.Incarnation{9}, Seq: uint64(i)}}
			r.Sum = r.Fingerprint()
			n.Offer(Call{Caller: caller, Check: r})
		}
		at := grant.Instant(i) * 10_000
		if records := n.Step(Reading{at, at}); len(records) > 0 {
			n.Done(nil)
		}
		n.Replies()
	}
}

// Case 27: no two buckets, owners or requests share an encoding, whatever the
// names are made of.
func TestCase27EncodingsAreInjective(t *testing.T) {
	names := []grant.TenantID{"a", "b", "ab", "a:b", "b:c", "a\x1f", "é"}
	classes := []grant.RouteClass{"c", "b.c", "a", "ab"}
	seen := map[string]string{}
	add := func(space, what string, key []byte) {
		if other, twice := seen[space+string(key)]; twice && other != what {
			t.Errorf("%s and %s share the encoding %q", other, what, key)
		}
		seen[space+string(key)] = what
	}
	incs := []grant.Incarnation{{'a'}, {'b', ':'}}
	for _, n := range names {
		for _, e := range []bool{false, true} {
			add("key", fmt.Sprintf("bucket %q %v", n, e), bucketKey(n, e))
			for _, i := range incs {
				add("key", fmt.Sprintf("owner %q %v %v", n, e, i), ownerKey(n, e, i))
				r := grant.GrantRequest{Tenant: n, Incarnation: i, Emergency: e, ID: 1, Want: 2, Min: 1}
				sum := r.Fingerprint()
				add("sum", fmt.Sprintf("grant %q %v %v", n, e, i), sum[:])
			}
		}
		for _, c := range classes {
			r := grant.CheckRequest{Tenant: n, Class: c, Count: 1, Attempt: grant.Attempt{Incarnation: incs[0], Seq: 1}}
			sum := r.Fingerprint()
			add("sum", fmt.Sprintf("check %q %q", n, c), sum[:])
		}
	}
}

// BenchmarkParkedWave is what it costs when many gateways ask for one saturated
// tenant at once, and all of them wait.
func BenchmarkParkedWave(b *testing.B) {
	for _, owners := range []int{32, 256, 2048} {
		b.Run(fmt.Sprint(owners), func(b *testing.B) {
			cfg := DefaultConfig()
			cfg.MaxInbox = 4 * owners
			for range b.N {
				n := NewNode(cfg, 0)
				if err := n.Load(fixed{}, Reading{}); err != nil {
					b.Fatal(err)
				}
				p := &grant.Policy{Rate: grant.Rate{Units: 1, Per: time.Hour}, Burst: 1, Classes: map[grant.RouteClass]grant.Class{"op": {Cost: 1}},
					Grant: grant.GrantSettings{Quantum: 10, Owners: owners, TTL: time.Hour}}
				n.Offer(Call{Put: &PutPolicy{Tenant: "t", Policy: p}})
				for i := range owners {
					inc := grant.Incarnation{byte(i), byte(i >> 8), 1}
					n.Offer(Call{Member: &Member{Incarnation: inc, Owner: "gw", State: Live}})
					r := &grant.GrantRequest{Tenant: "t", Incarnation: inc, ID: 1, Want: 10, Min: 1}
					r.Sum = r.Fingerprint()
					if _, ok := n.Offer(Call{Caller: b, Grant: r}); !ok {
						b.Fatal("inbox is full")
					}
				}
				for n.Waiting() > 0 {
					if len(n.Step(Reading{1, 1})) > 0 {
						n.Done(nil)
					}
				}
				if s := n.Stats(); s.Parked != owners-1 {
					b.Fatalf("%d parked", s.Parked)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*owners), "us/request")
		})
	}
}
