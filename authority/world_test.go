package authority_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// memory is a store of one partition that keeps what was committed.
type memory struct {
	records map[string][]byte
	commits int
}

func (m *memory) Load(_ grant.Partition, yield func(k, v []byte) error) error {
	keys := make([]string, 0, len(m.records))
	for k := range m.records {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for _, k := range keys {
		if err := yield([]byte(k), m.records[k]); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) Commit(_ grant.Partition, records []authority.Record) error {
	m.commits++
	seen := make(map[string]bool)
	for _, r := range records {
		if seen[string(r.Key)] {
			return fmt.Errorf("key %q stands twice in one batch", r.Key)
		}
		seen[string(r.Key)] = true
		if r.Value == nil {
			delete(m.records, string(r.Key))
		} else {
			m.records[string(r.Key)] = bytes.Clone(r.Value)
		}
	}
	return nil
}

// world is one Node over a memory store, at a time that the test moves.
type world struct {
	t     rapid.TB
	cfg   authority.Config
	node  *authority.Node
	store *memory
	now   grant.Instant // real time; both clocks of the machine show it
	boot  grant.Instant // what the clocks showed at time zero
	live  map[grant.Incarnation]grant.Owner
	seq   uint64
	seen  func([]authority.Reply) // told of replies at the time they are released
}

func newWorld(t rapid.TB) *world {
	w := &world{t: t, cfg: authority.DefaultConfig(), store: &memory{records: map[string][]byte{}}, live: map[grant.Incarnation]grant.Owner{}}
	w.load()
	return w
}

func (w *world) reading() authority.Reading {
	return authority.Reading{Mono: w.now + w.boot, Raw: w.now + w.boot}
}

// load starts a new node on the store, as after a crash.
func (w *world) load() {
	w.t.Helper()
	w.node = authority.NewNode(w.cfg, 7)
	if err := w.node.Load(w.store, w.reading()); err != nil {
		w.t.Fatal(err)
	}
	for _, inc := range w.sortedLive() {
		w.offer(authority.Call{Member: &authority.Member{Incarnation: inc, Owner: w.live[inc], State: authority.Live}})
	}
	w.step()
}

func (w *world) sortedLive() []grant.Incarnation {
	out := make([]grant.Incarnation, 0, len(w.live))
	for inc := range w.live {
		out = append(out, inc)
	}
	slices.SortFunc(out, func(a, b grant.Incarnation) int { return bytes.Compare(a[:], b[:]) })
	return out
}

func (w *world) offer(c authority.Call) {
	w.t.Helper()
	if r, ok := w.node.Offer(c); !ok {
		w.t.Fatalf("inbox is full: %+v", r)
	}
}

// step drives the node until nothing waits, committing what it returns.
func (w *world) step() []authority.Reply {
	w.t.Helper()
	var out []authority.Reply
	for {
		if records := w.node.Step(w.reading()); len(records) > 0 {
			if held := w.node.Replies(); len(held) > 0 {
				w.t.Fatalf("%d replies left before their records were durable", len(held))
			}
			w.node.Done(w.store.Commit(7, records))
		}
		released := w.node.Replies()
		if w.seen != nil {
			w.seen(released)
		}
		out = append(out, released...)
		if err := w.node.Check(); err != nil {
			w.t.Fatal(err)
		}
		if w.node.Waiting() == 0 {
			return out
		}
	}
}

// failCommit steps, commits nothing (or, with applied, everything) and reports
// the commit as failed.
func (w *world) failCommit(applied bool) []authority.Reply {
	w.t.Helper()
	records := w.node.Step(w.reading())
	if len(records) == 0 {
		w.t.Fatal("nothing to commit")
	}
	if applied {
		if err := w.store.Commit(7, records); err != nil {
			w.t.Fatal(err)
		}
	}
	w.node.Done(errors.New("outcome unknown"))
	return w.node.Replies()
}

// advance moves the time, stepping whenever the node asks to be woken.
func (w *world) advance(d time.Duration) []authority.Reply {
	w.t.Helper()
	end := w.now.Add(d)
	var out []authority.Reply
	for {
		wake := w.node.Wake(w.reading())
		if wake == grant.Never || wake-w.boot > end {
			break
		}
		w.now = max(w.now, wake-w.boot)
		out = append(out, w.step()...)
	}
	w.now = end
	return append(out, w.step()...)
}

func (w *world) call(c authority.Call) []authority.Reply {
	w.t.Helper()
	w.offer(c)
	return w.step()
}

func inc(name string) (i grant.Incarnation) {
	copy(i[:], name)
	return i
}

func (w *world) join(name string) grant.Incarnation {
	w.t.Helper()
	i := inc(name)
	w.live[i] = grant.Owner("gw-" + name)
	w.call(authority.Call{Member: &authority.Member{Incarnation: i, Owner: w.live[i], State: authority.Live}})
	return i
}

func (w *world) put(t grant.TenantID, p *grant.Policy) *authority.PutResult {
	w.t.Helper()
	for _, r := range w.call(authority.Call{Caller: "put", Put: &authority.PutPolicy{Tenant: t, Policy: p, AnyVersion: true}}) {
		if r.Put != nil {
			if len(r.Put.Problems) > 0 {
				w.t.Fatalf("policy of %s: %v", t, r.Put.Problems)
			}
			return r.Put
		}
	}
	w.t.Fatal("no answer to put")
	return nil
}

func grantOf(t grant.TenantID, i grant.Incarnation, id grant.GrantID, want, min, held grant.Units) *grant.GrantRequest {
	r := &grant.GrantRequest{Tenant: t, Incarnation: i, ID: id, Want: want, Min: min, Held: held}
	r.Sum = r.Fingerprint()
	return r
}

// ask sends a grant request and returns its first answer.
func (w *world) ask(r *grant.GrantRequest) *grant.GrantAnswer {
	w.t.Helper()
	return answerTo(w.t, w.call(authority.Call{Caller: r.ID, Grant: r}), r)
}

func answerTo(t rapid.TB, replies []authority.Reply, r *grant.GrantRequest) *grant.GrantAnswer {
	t.Helper()
	for _, p := range replies {
		if g := p.Grant; g != nil && g.ID == r.ID && g.Incarnation == r.Incarnation && g.Tenant == r.Tenant {
			return g
		}
	}
	t.Fatalf("no answer to grant %d of %v among %d replies", r.ID, r.Incarnation, len(replies))
	return nil
}

func checkOf(t grant.TenantID, i grant.Incarnation, seq uint64, class grant.RouteClass, count grant.Units) *grant.CheckRequest {
	r := &grant.CheckRequest{Tenant: t, Class: class, Count: count, Attempt: grant.Attempt{Incarnation: i, Seq: seq}}
	r.Sum = r.Fingerprint()
	return r
}

func (w *world) send(r *grant.CheckRequest) *grant.CheckAnswer {
	w.t.Helper()
	for _, p := range w.call(authority.Call{Caller: r.Attempt.Seq, Check: r}) {
		if p.Check != nil && p.Check.Attempt == r.Attempt {
			return p.Check
		}
	}
	w.t.Fatalf("no answer to attempt %v", r.Attempt)
	return nil
}

// check makes a new attempt of count operations of class "op".
func (w *world) check(t grant.TenantID, count grant.Units) *grant.CheckAnswer {
	w.t.Helper()
	w.seq++
	return w.send(checkOf(t, inc("caller"), w.seq, "op", count))
}

func (w *world) state(t grant.TenantID) *authority.TenantState {
	w.t.Helper()
	for _, p := range w.call(authority.Call{Caller: "get", Get: &authority.GetTenant{Tenant: t}}) {
		if p.Tenant != nil {
			return p.Tenant
		}
	}
	w.t.Fatal("no answer to get")
	return nil
}

// plain is a policy with one class "op" of cost 1 and no grants.
func plain(units grant.Units, per time.Duration, burst grant.Units) *grant.Policy {
	return &grant.Policy{
		Rate: grant.Rate{Units: units, Per: per}, Burst: burst,
		Classes: map[grant.RouteClass]grant.Class{"op": {Cost: 1}},
	}
}

// withGrants adds grant settings.
func withGrants(p *grant.Policy, q grant.Units, n int, ttl time.Duration) *grant.Policy {
	c := *p
	c.Grant = grant.GrantSettings{Quantum: q, Owners: n, TTL: ttl}
	return &c
}
