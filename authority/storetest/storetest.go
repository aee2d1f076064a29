// Package storetest says what is asked of an authority.Store, as tests that any
// store must pass: the one on a local disk, the replicated one, and the
// simulated disk, so that what the simulator proves holds for the real ones.
//
// The properties, each a subtest of Run:
//
//  1. What was committed is loaded: exactly, in order of key, for any bytes.
//  2. Partitions do not see each other's records.
//  3. A store keeps nothing of the caller's slices and changes nothing in them.
//  4. An error of yield ends a load and comes back.
//  5. A large commit is loaded whole.
//  6. Closing and opening changes nothing.
//  7. An acknowledged commit survives a crash at any later moment, and of a
//     commit that was cut off all records are there or none.
//  8. A commit that failed is there whole or not at all after a reload, and what
//     the reload saw stays: nothing of it appears or vanishes later.
//  9. Partitions may commit and load at once.
//  10. A crash while all partitions commit leaves each a prefix of its commits
//     that is no shorter than what was acknowledged before the crash.
package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Harness is one store under test and the machine it runs on. The suite calls
// one method at a time; only Commit and Load of the opened store may be running
// while Crash is called. A method that cannot do its work fails the test.
type Harness interface {
	// Open starts the store: the first call creates it, later calls find what
	// the machine kept. It is called only when the store is not open.
	Open(t testing.TB) authority.Store
	// Close stops an open store in an orderly way.
	Close(t testing.TB)
	// Crash ends process and machine at this moment: what the store did not make
	// durable is lost, or partly lost if the harness so chooses. Calls of the
	// store that are in flight may end in any way; their outcome is of the dead
	// process and counts for nothing. The store is not open afterwards.
	Crash(t testing.TB)
	// Fail makes the next Commit of the open store end in an error, the records
	// being lost or kept as asked. It reports whether the harness can do that;
	// a harness can do at least one of both.
	Fail(t testing.TB, o Outcome) bool
	// Reload returns a store that may be loaded after a failed Commit: the same
	// one, or a new one after the end of the process. The store is open
	// afterwards, and commits succeed again.
	Reload(t testing.TB) authority.Store
}

// Outcome is what becomes of the records of a failed Commit.
type Outcome uint8

const (
	// Lost: the records did not reach the store.
	Lost Outcome = iota
	// Kept: the records are durable although the caller was told otherwise.
	Kept
)

func (o Outcome) String() string { return [...]string{"lost", "kept"}[o] }

// Run runs the suite. fresh returns a fresh harness whose Open creates an empty
// store; it registers its own clean-up, which must cope with an open store.
func Run(t *testing.T, fresh func(t *testing.T) Harness) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, h Harness)
	}{
		{"LoadYieldsWhatWasCommitted", loadYieldsWhatWasCommitted},
		{"PartitionsAreApart", partitionsAreApart},
		{"CallersSlicesAreTheCallers", callersSlicesAreTheCallers},
		{"YieldErrorEndsLoad", yieldErrorEndsLoad},
		{"LargeCommitIsWhole", largeCommitIsWhole},
		{"FailedCommitIsWholeOrAbsent", failedCommitIsWholeOrAbsent},
		{"RandomHistories", randomHistories},
		{"PartitionsRunAtOnce", partitionsRunAtOnce},
		{"CrashWhileAllCommit", crashWhileAllCommit},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, fresh(t)) })
	}
}

// model is what a partition must hold. Keys and values are strings so that a
// test cannot change them by accident.
type model map[string]string

func (m model) with(records []authority.Record) model {
	next := make(model, len(m)+len(records))
	for k, v := range m {
		next[k] = v
	}
	for _, r := range records {
		if r.Value == nil {
			delete(next, string(r.Key))
		} else {
			next[string(r.Key)] = string(r.Value)
		}
	}
	return next
}

// diff says how two contents differ, or nothing.
func (m model) diff(want model) string {
	var out []string
	for k, v := range m {
		if w, ok := want[k]; !ok {
			out = append(out, fmt.Sprintf("unexpected key %q", k))
		} else if v != w {
			out = append(out, fmt.Sprintf("key %q: %d bytes of another value", k, len(v)))
		}
	}
	for k := range want {
		if _, ok := m[k]; !ok {
			out = append(out, fmt.Sprintf("missing key %q", k))
		}
	}
	slices.Sort(out)
	if len(out) > 5 {
		out = append(out[:5], fmt.Sprintf("and %d more", len(out)-5))
	}
	return strings.Join(out, "; ")
}

func set(key, value string) authority.Record {
	return authority.Record{Key: []byte(key), Value: []byte(value)}
}

func del(key string) authority.Record { return authority.Record{Key: []byte(key)} }

func commit(t testing.TB, s authority.Store, p grant.Partition, records ...authority.Record) {
	t.Helper()
	if err := s.Commit(p, records); err != nil {
		t.Fatalf("Commit(%d, %d records): %v", p, len(records), err)
	}
}

// load reads a partition and checks the order of its keys.
func load(s authority.Store, p grant.Partition) (model, error) {
	got := make(model)
	var last []byte
	err := s.Load(p, func(k, v []byte) error {
		if len(got) > 0 && bytes.Compare(last, k) >= 0 {
			return fmt.Errorf("key %q came after %q", k, last)
		}
		last = append(last[:0], k...)
		got[string(k)] = string(v)
		return nil
	})
	return got, err
}

func expect(t testing.TB, s authority.Store, p grant.Partition, want model) {
	t.Helper()
	got, err := load(s, p)
	if err != nil {
		t.Fatalf("Load(%d): %v", p, err)
	}
	if d := got.diff(want); d != "" {
		t.Fatalf("partition %d: %s", p, d)
	}
}

// awkward are keys and values that an encoding might confuse: empty, prefixes of
// each other, the ends of the byte range, separators, no UTF-8.
var awkward = []string{"", "\x00", "\x00\x00", "\x00\xff", "a", "a\x00", "ab", "a/b", "b", "é", "R", "\x7f", "\xfe", "\xff", "\xff\xff", strings.Repeat("k", 700)}

func loadYieldsWhatWasCommitted(t *testing.T, h Harness) {
	s := h.Open(t)
	expect(t, s, 0, model{})
	want := make(model)
	for i, k := range awkward {
		r := set(k, awkward[len(awkward)-1-i])
		commit(t, s, 0, r)
		want = want.with([]authority.Record{r})
	}
	expect(t, s, 0, want)

	change := []authority.Record{del("a"), set("ab", "other"), del("never set"), set("\xff\xff\xff", ""), set("b", strings.Repeat("v", 64<<10))}
	commit(t, s, 0, change...)
	commit(t, s, 0) // nothing
	want = want.with(change)
	expect(t, s, 0, want)
	expect(t, s, 0, want) // loading changes nothing
	commit(t, s, 0, set("a", "again"))
	want["a"] = "again"
	expect(t, s, 0, want)

	h.Close(t)
	expect(t, h.Open(t), 0, want)
}

func partitionsAreApart(t *testing.T, h Harness) {
	s := h.Open(t)
	for p := range grant.Partition(grant.Partitions) {
		commit(t, s, p, set("k", fmt.Sprint(p)), set("gone", "x"), set("\xff\xff", "last"), set("", "first"))
	}
	for p := range grant.Partition(grant.Partitions) {
		if p%2 == 0 {
			commit(t, s, p, del("gone"))
		}
	}
	check := func(s authority.Store) {
		for p := range grant.Partition(grant.Partitions) {
			want := model{"k": fmt.Sprint(p), "gone": "x", "\xff\xff": "last", "": "first"}
			if p%2 == 0 {
				delete(want, "gone")
			}
			expect(t, s, p, want)
		}
	}
	check(s)
	h.Crash(t)
	check(h.Open(t))
}

func callersSlicesAreTheCallers(t *testing.T, h Harness) {
	s := h.Open(t)
	key, value := []byte("key"), []byte("value")
	records := []authority.Record{{Key: key, Value: value}, {Key: []byte("none")}}
	commit(t, s, 3, records...)
	if string(key) != "key" || string(value) != "value" || string(records[1].Key) != "none" || records[1].Value != nil {
		t.Fatalf("Commit changed the caller's records: %q", records)
	}
	copy(key, "KEY")
	copy(value, "VALUE")
	expect(t, s, 3, model{"key": "value"})
	// What Load hands out is the callee's; writing to it must not reach the store.
	if err := s.Load(3, func(k, v []byte) error {
		_, _ = append(k[:len(k):len(k)], 'x'), append(v[:len(v):len(v)], 'x')
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	expect(t, s, 3, model{"key": "value"})
	h.Crash(t)
	expect(t, h.Open(t), 3, model{"key": "value"})
}

func yieldErrorEndsLoad(t *testing.T, h Harness) {
	s := h.Open(t)
	commit(t, s, 9, set("a", "1"), set("b", "2"), set("c", "3"))
	stop := errors.New("stop")
	calls := 0
	err := s.Load(9, func(k, _ []byte) error {
		if calls++; string(k) == "b" {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || calls != 2 {
		t.Fatalf("Load ended after %d records with %v, want 2 and the error of yield", calls, err)
	}
	commit(t, s, 9, set("d", "4"))
	expect(t, s, 9, model{"a": "1", "b": "2", "c": "3", "d": "4"})
}

func largeCommitIsWhole(t *testing.T, h Harness) {
	s := h.Open(t)
	var records []authority.Record
	for i := range 1000 {
		records = append(records, set(fmt.Sprintf("k%04d", i), strings.Repeat("v", 1+i%200)))
	}
	commit(t, s, 7, set("k0001", "old"), set("kept", "yes"))
	commit(t, s, 7, records...)
	want := model{"k0001": "old", "kept": "yes"}.with(records)
	expect(t, s, 7, want)
	h.Crash(t)
	s = h.Open(t)
	expect(t, s, 7, want)
	for i := range records {
		records[i].Value = nil
	}
	commit(t, s, 7, records...)
	h.Crash(t)
	expect(t, h.Open(t), 7, model{"kept": "yes"})
}

func failedCommitIsWholeOrAbsent(t *testing.T, h Harness) {
	s := h.Open(t)
	state := model{}
	did := 0
	for round := range 6 {
		outcome := Outcome(round % 2)
		base := []authority.Record{set("base", fmt.Sprint(round)), set("old", fmt.Sprint(round))}
		commit(t, s, 1, base...)
		state = state.with(base)
		if !h.Fail(t, outcome) {
			continue
		}
		did++
		records := []authority.Record{set(fmt.Sprint("x", round), "1"), set("base", "changed"), del("old"), set(fmt.Sprint("y", round), "2")}
		if err := s.Commit(1, records); err == nil {
			t.Fatal("Commit succeeded where the harness made it fail")
		}
		s = h.Reload(t)
		got, err := load(s, 1)
		if err != nil {
			t.Fatalf("Load after Reload: %v", err)
		}
		before, after := got.diff(state), got.diff(state.with(records))
		switch {
		case before != "" && after != "":
			t.Fatalf("round %d (%v): the failed commit is there in part: against before: %s; against after: %s", round, outcome, before, after)
		case before != "" && outcome == Lost:
			t.Fatalf("round %d: the records are there and should be lost: the harness does not do what it says", round)
		case after != "" && outcome == Kept:
			t.Fatalf("round %d: the records are lost and should be kept: the harness does not do what it says", round)
		}
		state = got
		commit(t, s, 1, set("next", fmt.Sprint(round)))
		state = state.with([]authority.Record{set("next", fmt.Sprint(round))})
		expect(t, s, 1, state)
		h.Crash(t)
		s = h.Open(t)
		expect(t, s, 1, state)
	}
	if did == 0 {
		t.Fatal("the harness can make no commit fail")
	}
}

// historyBudget bounds the time for random histories: a store that syncs a real
// disk gets fewer of them than one in memory.
const historyBudget = 3 * time.Second

// randomHistories checks properties 1, 6, 7 and 8 together on random histories
// over three partitions.
func randomHistories(t *testing.T, h Harness) {
	s := h.Open(t)
	keys := []string{"", "a", "a\x00", "b", "bb", "c", "\xff"}
	partitions := []grant.Partition{0, 31, grant.Partitions - 1}
	start := time.Now()
	rapid.Check(t, func(rt *rapid.T) {
		if time.Since(start) > historyBudget && !t.Failed() {
			return
		}
		state := make(map[grant.Partition]model)
		for _, p := range partitions { // start empty: the store is the same for all histories
			got, err := load(s, p)
			if err != nil {
				rt.Fatalf("Load(%d): %v", p, err)
			}
			var records []authority.Record
			for k := range got {
				records = append(records, del(k))
			}
			if err := s.Commit(p, records); err != nil {
				rt.Fatalf("Commit(%d): %v", p, err)
			}
			state[p] = model{}
		}
		check := func() {
			for _, p := range partitions {
				got, err := load(s, p)
				if err != nil {
					rt.Fatalf("Load(%d): %v", p, err)
				}
				if d := got.diff(state[p]); d != "" {
					rt.Fatalf("partition %d: %s", p, d)
				}
			}
		}
		draw := func() (grant.Partition, []authority.Record) {
			p := rapid.SampledFrom(partitions).Draw(rt, "partition")
			var records []authority.Record
			for _, k := range rapid.SliceOfNDistinct(rapid.SampledFrom(keys), 1, len(keys), rapid.ID).Draw(rt, "keys") {
				if rapid.Bool().Draw(rt, "delete") {
					records = append(records, del(k))
				} else {
					records = append(records, set(k, string(rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(rt, "value"))))
				}
			}
			return p, records
		}
		rt.Repeat(map[string]func(*rapid.T){
			"commit": func(*rapid.T) {
				p, records := draw()
				if err := s.Commit(p, records); err != nil {
					rt.Fatalf("Commit(%d): %v", p, err)
				}
				state[p] = state[p].with(records)
			},
			"load": func(*rapid.T) { check() },
			"close": func(*rapid.T) {
				h.Close(t)
				s = h.Open(t)
				check()
			},
			"crash": func(*rapid.T) {
				h.Crash(t)
				s = h.Open(t)
				check()
			},
			"fail": func(*rapid.T) {
				if !h.Fail(t, rapid.SampledFrom([]Outcome{Lost, Kept}).Draw(rt, "outcome")) {
					return
				}
				p, records := draw()
				if err := s.Commit(p, records); err == nil {
					rt.Fatal("Commit succeeded where the harness made it fail")
				}
				s = h.Reload(t)
				got, err := load(s, p)
				if err != nil {
					rt.Fatalf("Load(%d): %v", p, err)
				}
				if before := got.diff(state[p]); before != "" {
					if after := got.diff(state[p].with(records)); after != "" {
						rt.Fatalf("partition %d: a failed commit is there in part: against before: %s; against after: %s", p, before, after)
					}
					state[p] = got
				}
				check()
			},
		})
	})
}

// stream writes numbered commits of one partition: commit n sets "n" and every
// key of a row to n, so that a reader can tell which commits it sees and
// whether it sees them whole.
const row = 5

func streamRecords(n uint64) []authority.Record {
	records := []authority.Record{set("n", fmt.Sprint(n)), set(fmt.Sprintf("log%08d", n), "x")}
	for i := range row {
		records = append(records, set(fmt.Sprintf("row%d", i), fmt.Sprint(n)))
	}
	return records
}

// streamLength is how many commits of a stream a partition holds; it fails on a
// commit that is there in part or a gap.
func streamLength(s authority.Store, p grant.Partition) (uint64, error) {
	got, err := load(s, p)
	if err != nil || len(got) == 0 {
		return 0, err
	}
	n := uint64(len(got) - 1 - row)
	want := make(model)
	for i := range n {
		want = want.with(streamRecords(i + 1)[1:2])
	}
	want = want.with(streamRecords(n))
	if d := got.diff(want); d != "" {
		return n, fmt.Errorf("partition %d with %d commits: %s", p, n, d)
	}
	return n, nil
}

func partitionsRunAtOnce(t *testing.T, h Harness) {
	const commits = 10
	s := h.Open(t)
	var all sync.WaitGroup
	errs := make([]error, grant.Partitions)
	for p := range grant.Partition(grant.Partitions) {
		all.Go(func() {
			for n := range uint64(commits) {
				if err := s.Commit(p, streamRecords(n+1)); err != nil {
					errs[p] = err
					return
				}
				if n%4 == 3 {
					if got, err := streamLength(s, p); err != nil || got != n+1 {
						errs[p] = fmt.Errorf("loaded %d commits of %d: %w", got, n+1, err)
						return
					}
				}
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	h.Crash(t)
	s = h.Open(t)
	for p := range grant.Partition(grant.Partitions) {
		if got, err := streamLength(s, p); err != nil || got != commits {
			t.Fatalf("partition %d: %d commits of %d: %v", p, got, commits, err)
		}
	}
}

func crashWhileAllCommit(t *testing.T, h Harness) {
	rng := rand.New(rand.NewPCG(1, 2))
	s := h.Open(t)
	for p := range grant.Partition(grant.Partitions) { // so that a stream has a length
		commit(t, s, p, streamRecords(1)...)
	}
	var have [grant.Partitions]uint64
	for p := range have {
		have[p] = 1
	}
	for round := range 5 {
		var acked, begun [grant.Partitions]atomic.Uint64
		var total atomic.Uint64
		enough := make(chan struct{})
		stopAt := 1 + rng.Uint64N(500)
		var dead atomic.Bool
		var all sync.WaitGroup
		for p := range grant.Partition(grant.Partitions) {
			acked[p].Store(have[p])
			begun[p].Store(have[p])
			all.Go(func() {
				for n := have[p] + 1; !dead.Load(); n++ {
					begun[p].Store(n)
					if s.Commit(p, streamRecords(n)) != nil {
						return
					}
					acked[p].Store(n)
					if total.Add(1) == stopAt {
						close(enough)
					}
				}
			})
		}
		stopped := make(chan struct{})
		go func() { all.Wait(); close(stopped) }()
		select {
		case <-enough:
		case <-stopped:
			t.Fatalf("round %d: commits fail without a crash after %d", round, total.Load())
		}
		var least [grant.Partitions]uint64
		for p := range least {
			least[p] = acked[p].Load()
		}
		h.Crash(t)
		dead.Store(true)
		<-stopped
		s = h.Open(t)
		for p := range least {
			got, err := streamLength(s, grant.Partition(p))
			if err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			if got < least[p] || got > begun[p].Load() {
				t.Fatalf("round %d: partition %d holds %d commits; %d were acknowledged before the crash, %d begun", round, p, got, least[p], begun[p].Load())
			}
			have[p] = got
		}
	}
}
