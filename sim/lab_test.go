package sim

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// lab is one Node over a store in memory, at a time that the test moves: for
// scenarios that concern the authority alone.
type lab struct {
	t       testing.TB
	cfg     authority.Config
	node    *authority.Node
	records map[string][]byte
	now     grant.Instant // real time
	boot    grant.Instant // what the machine's clocks show at real time 0
	replies map[int]authority.Reply
	next    int
	seq     uint64
	known   []authority.Member
}

const acme grant.TenantID = "acme"

func inc(i int) grant.Incarnation { return grant.Incarnation{0: 1, 15: byte(i), 14: byte(i >> 8)} }

// newLab has a policy for acme and n live members.
func newLab(t testing.TB, p *grant.Policy, n int) *lab {
	l := &lab{t: t, cfg: authority.DefaultConfig(), records: map[string][]byte{}, boot: 1_000_000_000_000, replies: map[int]authority.Reply{}}
	for i := range n {
		l.known = append(l.known, authority.Member{Incarnation: inc(i), Owner: grant.Owner(fmt.Sprintf("gw%d", i)), State: authority.Live})
	}
	l.load()
	if p != nil {
		l.put(p)
	}
	return l
}

func (l *lab) Load(_ grant.Partition, yield func(k, v []byte) error) error {
	for _, k := range slices.Sorted(maps.Keys(l.records)) {
		if err := yield([]byte(k), l.records[k]); err != nil {
			return err
		}
	}
	return nil
}

func (l *lab) Commit(_ grant.Partition, records []authority.Record) error {
	for _, r := range records {
		if r.Value == nil {
			delete(l.records, string(r.Key))
		} else {
			l.records[string(r.Key)] = bytes.Clone(r.Value)
		}
	}
	return nil
}

func (l *lab) reading() authority.Reading {
	return authority.Reading{Mono: l.now + l.boot, Raw: l.now + l.boot}
}

// load reads the store into a fresh Node, as after a crash.
func (l *lab) load() {
	l.t.Helper()
	l.node = authority.NewNode(l.cfg, 0)
	if err := l.node.Load(l, l.reading()); err != nil {
		l.t.Fatal(err)
	}
	for _, m := range l.known {
		l.node.Offer(authority.Call{Member: &m})
	}
	l.step(nil)
}

// crash loses memory and everything uncommitted; the machine boots with other
// clocks after down of real time.
func (l *lab) crash(down time.Duration) {
	l.now = l.now.Add(down)
	l.boot += 7_777_777_777
	l.load()
}

var errLab = errors.New("commit failed")

// step takes one step and commits it with the outcome; landed says that a failed
// commit reached the store.
func (l *lab) step(fail error, landed ...bool) {
	l.t.Helper()
	for {
		records := l.node.Step(l.reading())
		if len(records) > 0 {
			if r := l.node.Replies(); len(r) > 0 {
				l.t.Fatalf("%d replies before their records were durable", len(r))
			}
			if fail == nil || len(landed) > 0 && landed[0] {
				l.Commit(0, records)
			}
			l.node.Done(fail)
		}
		l.collect()
		if err := l.node.Check(); err != nil {
			l.t.Fatal(err)
		}
		if l.node.Waiting() == 0 {
			return
		}
	}
}

func (l *lab) collect() {
	for _, r := range l.node.Replies() {
		if n, ok := r.Caller.(int); ok {
			l.replies[n] = r
		}
	}
}

// advance moves the time, stepping whenever the Node wants it.
func (l *lab) advance(d time.Duration) {
	l.t.Helper()
	end := l.now.Add(d)
	for {
		wake := l.node.Wake(l.reading())
		if wake == grant.Never || wake-l.boot > end {
			break
		}
		l.now = max(l.now, wake-l.boot)
		l.step(nil)
	}
	l.now = end
	l.step(nil)
}

// offer queues a call and returns the number under which its reply comes.
func (l *lab) offer(c authority.Call) int {
	l.t.Helper()
	l.next++
	c.Caller = l.next
	if refusal, ok := l.node.Offer(c); !ok {
		l.replies[l.next] = refusal
	}
	return l.next
}

func (l *lab) put(p *grant.Policy) authority.PutResult {
	l.t.Helper()
	n := l.offer(authority.Call{Put: &authority.PutPolicy{Tenant: acme, Policy: p, AnyVersion: true}})
	l.step(nil)
	res := l.replies[n].Put
	if res == nil {
		l.t.Fatal("no answer to a put")
	}
	return *res
}

func (l *lab) mustPut(p *grant.Policy) {
	l.t.Helper()
	if res := l.put(p); res.Reason != grant.None {
		l.t.Fatalf("put: %v %v", res.Reason, res.Problems)
	}
}

func (l *lab) checkRequest(class grant.RouteClass, count grant.Units) grant.CheckRequest {
	l.seq++
	r := grant.CheckRequest{Tenant: acme, Class: class, Count: count, Attempt: grant.Attempt{Incarnation: inc(250), Seq: l.seq}}
	r.Sum = r.Fingerprint()
	return r
}

func (l *lab) check(class grant.RouteClass, count grant.Units) grant.CheckAnswer {
	l.t.Helper()
	return l.send(l.checkRequest(class, count))
}

func (l *lab) send(r grant.CheckRequest) grant.CheckAnswer {
	l.t.Helper()
	n := l.offer(authority.Call{Check: &r})
	l.step(nil)
	return *l.replies[n].Check
}

// allowed asks one by one and counts.
func (l *lab) allowed(n int) (admitted int) {
	l.t.Helper()
	for range n {
		if l.check("c", 1).Verdict == grant.Allow {
			admitted++
		}
	}
	return admitted
}

func grantRequest(owner int, id grant.GrantID, want, least, held grant.Units) grant.GrantRequest {
	r := grant.GrantRequest{Tenant: acme, Incarnation: inc(owner), ID: id, Want: want, Min: least, Held: held}
	r.Sum = r.Fingerprint()
	return r
}

func (l *lab) ask(r grant.GrantRequest) grant.GrantAnswer {
	l.t.Helper()
	n := l.offer(authority.Call{Grant: &r})
	l.step(nil)
	return *l.replies[n].Grant
}

func (l *lab) member(owner int, s authority.MemberState) {
	l.t.Helper()
	m := authority.Member{Incarnation: inc(owner), Owner: grant.Owner(fmt.Sprintf("gw%d", owner)), State: s}
	l.known = append(l.known, m)
	l.node.Offer(authority.Call{Member: &m})
	l.step(nil)
}

func (l *lab) state() authority.TenantState {
	l.t.Helper()
	n := l.offer(authority.Call{Get: &authority.GetTenant{Tenant: acme}})
	l.step(nil)
	return *l.replies[n].Tenant
}

func (l *lab) level() grant.Units { l.t.Helper(); return l.state().Ordinary.Level }

// isGrant fails unless the answer is a grant of units.
func isGrant(t testing.TB, a grant.GrantAnswer, units grant.Units) {
	t.Helper()
	if a.Result != grant.Granted || a.Units != units {
		t.Fatalf("answered %v %v of %d units, want a grant of %d", a.Result, a.Reason, a.Units, units)
	}
}

func answered(t testing.TB, a grant.GrantAnswer, result grant.GrantResult, why grant.Reason) {
	t.Helper()
	if a.Result != result || a.Reason != why {
		t.Fatalf("answered %v %v of %d units, want %v %v", a.Result, a.Reason, a.Units, result, why)
	}
}
