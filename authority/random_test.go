package authority_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// deduction is what the ledger acknowledged to have taken from one bucket.
type deduction struct {
	at    grant.Instant
	units grant.Units
}

// TestRandomPartition drives one Node through random grants, Checks, retries,
// policy edits, deletes, members, crashes, failed and unknown commits and clocks
// that drift, and holds beside it:
//
//   - the invariants, after every step (world.step);
//   - no key twice in a batch, no reply before its records (world.step);
//   - over every interval, acknowledged deductions are at most the integral of
//     the rate plus the largest burst in force: the bound with N*q = 0;
//   - an acknowledged grant or ALLOW is answered the same again, also after a crash;
//   - what was acknowledged is never granted beyond N*q of the policy in force.
func TestRandomPartition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		incs := []grant.Incarnation{inc("a"), inc("b"), inc("c"), inc("d")}
		for _, n := range []string{"a", "b", "c", "d"} {
			w.join(n)
		}
		tenants := []grant.TenantID{"t", "u"}
		pol := map[grant.TenantID]*grant.Policy{}
		spent := map[grant.TenantID][]deduction{}
		maxBurst := map[grant.TenantID]grant.Units{}
		maxRate := map[grant.TenantID]grant.Units{}
		next := map[string]grant.GrantID{}
		held := map[string]grant.Units{} // as the last acknowledged grant left it
		lastGrant := map[string]*grant.GrantRequest{}
		lastAnswer := map[string]grant.GrantAnswer{}
		applied := map[string]grant.Instant{} // when a grant of unknown outcome was deducted in truth
		lost := map[grant.Incarnation]bool{}
		mayForget := map[string]bool{} // granted while lost: forgotten with its units
		allowed := map[grant.Attempt]*grant.CheckRequest{}
		seq := uint64(0)
		drawPolicy := func() *grant.Policy {
			p := plain(grant.Units(rapid.Int64Range(0, 50).Draw(t, "rate")), time.Second, grant.Units(rapid.Int64Range(1, 60).Draw(t, "burst")))
			return withGrants(p, grant.Units(rapid.Int64Range(0, 20).Draw(t, "q")), rapid.IntRange(0, 6).Draw(t, "n"), time.Duration(rapid.Int64Range(1, 10).Draw(t, "ttl"))*time.Second)
		}
		w.seen = func(replies []authority.Reply) {
			for _, r := range replies {
				if g := r.Grant; g != nil && g.Result == grant.Granted {
					k := string(g.Tenant) + string(g.Incarnation[:])
					if prev, ok := lastAnswer[k]; ok && prev.ID == g.ID {
						if prev.Units == g.Units && prev.TTL == g.TTL {
							continue
						}
						if !mayForget[k] {
							t.Fatalf("grant %d answered with %d for %v, then with %d for %v", g.ID, prev.Units, prev.TTL, g.Units, g.TTL)
						}
					}
					req := lastGrant[k]
					if req == nil || req.ID != g.ID {
						continue
					}
					lastAnswer[k] = *g
					mayForget[k] = lost[g.Incarnation]
					held[k] = req.Held + g.Units
					at, ok := applied[fmt.Sprint(k, g.ID)]
					if !ok {
						at = w.now
					}
					spent[g.Tenant] = append(spent[g.Tenant], deduction{at, g.Units})
				}
				if c := r.Check; c != nil && c.Verdict == grant.Allow && !c.Replayed && c.Cost > 0 {
					spent[c.Tenant] = append(spent[c.Tenant], deduction{w.now, c.Cost})
				}
			}
		}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			id := rapid.SampledFrom(tenants).Draw(t, "tenant")
			i := rapid.SampledFrom(incs).Draw(t, "inc")
			k := string(id) + string(i[:])
			switch op := rapid.IntRange(0, 12).Draw(t, "op"); op {
			case 0:
				p := drawPolicy()
				pol[id] = p
				maxBurst[id] = max(maxBurst[id], p.Burst)
				maxRate[id] = max(maxRate[id], p.Rate.Units)
				w.call(authority.Call{Caller: "put", Put: &authority.PutPolicy{Tenant: id, Policy: p, AnyVersion: true}})
			case 1:
				w.call(authority.Call{Caller: "put", Put: &authority.PutPolicy{Tenant: id, AnyVersion: true}})
			case 2, 3, 4:
				next[k]++
				h := held[k]
				if h > 0 {
					h = grant.Units(rapid.Int64Range(0, int64(h)).Draw(t, "held"))
				}
				need := grant.Units(rapid.Int64Range(1, 10).Draw(t, "min"))
				r := grantOf(id, i, next[k], need+grant.Units(rapid.Int64Range(0, 10).Draw(t, "more")), need, h)
				lastGrant[k], held[k] = r, h
				w.call(authority.Call{Caller: "g", Grant: r})
			case 5:
				if r := lastGrant[k]; r != nil {
					w.call(authority.Call{Caller: "g", Grant: r})
				}
			case 6, 7:
				seq++
				r := checkOf(id, i, seq, "op", grant.Units(rapid.Int64Range(0, 20).Draw(t, "count")))
				a := w.send(r)
				if a.Verdict == grant.Allow && a.Cost > 0 {
					allowed[r.Attempt] = r
				}
			case 8: // crash; everything acknowledged must still be there
				w.now = w.now.Add(time.Duration(rapid.Int64Range(0, 20e9).Draw(t, "down")))
				w.boot = grant.Instant(rapid.Int64Range(0, 1e18).Draw(t, "clock"))
				w.load() // which registers everybody again
				clear(lost)
				attempts := slices.SortedFunc(maps.Keys(allowed), func(a, b grant.Attempt) int { return cmp.Compare(a.Seq, b.Seq) })
				for _, att := range attempts {
					r := allowed[att]
					w.offer(authority.Call{Caller: "again", Check: r})
					for _, p := range w.step() {
						if c := p.Check; c != nil && c.Attempt == att && c.Verdict == grant.Allow && !c.Replayed {
							t.Fatalf("attempt %v was allowed again as a new one", att)
						}
					}
				}
				for _, k := range slices.Sorted(maps.Keys(lastGrant)) {
					w.offer(authority.Call{Caller: "g", Grant: lastGrant[k]})
				}
				w.step()
			case 9: // the commit fails or its outcome is unknown; the node reloads
				seq++
				w.offer(authority.Call{Caller: "c", Check: checkOf(id, i, seq, "op", 1)})
				if r := lastGrant[k]; r != nil && rapid.Bool().Draw(t, "with grant") {
					next[k]++
					r = grantOf(id, i, next[k], 5, 1, 0)
					lastGrant[k], held[k] = r, 0
					w.offer(authority.Call{Caller: "g", Grant: r})
				}
				records := w.node.Step(w.reading())
				if len(records) > 0 {
					if rapid.Bool().Draw(t, "applied") {
						if err := w.store.Commit(7, records); err != nil {
							t.Fatal(err)
						}
						applied[fmt.Sprint(k, next[k])] = w.now
					}
					w.node.Done(fmt.Errorf("unknown"))
					for _, r := range w.node.Replies() {
						if g := r.Grant; g != nil && g.Result != grant.Busy {
							t.Fatalf("a failed commit answered %v", g.Result)
						}
						if c := r.Check; c != nil && c.Verdict != grant.Undecided {
							t.Fatalf("a failed commit answered %v", c.Verdict)
						}
					}
					w.load()
				} else {
					w.node.Replies()
				}
			case 10:
				s := rapid.SampledFrom([]authority.MemberState{authority.Lost, authority.Live}).Draw(t, "state")
				w.call(authority.Call{Member: &authority.Member{Incarnation: i, Owner: "gw", State: s}})
				lost[i] = s == authority.Lost
				if s == authority.Lost { // what a lost incarnation asked is forgotten with its units
					for _, tn := range tenants {
						k := string(tn) + string(i[:])
						delete(lastAnswer, k)
						delete(lastGrant, k)
						delete(held, k)
					}
				}
			default:
				w.advance(time.Duration(rapid.Int64Range(1, 4e9).Draw(t, "dt")))
			}
			for tn, p := range pol {
				s := w.state(tn)
				if s.Deleted || s.Reason != grant.None {
					continue
				}
				if s.Ordinary.Level > p.Burst {
					t.Fatalf("level %d, burst %d", s.Ordinary.Level, p.Burst)
				}
			}
		}
		for id, ds := range spent {
			slices.SortStableFunc(ds, func(a, b deduction) int { return cmp.Compare(a.at, b.at) })
			for i := range ds {
				var sum grant.Units
				for _, d := range ds[i:] {
					sum += d.units
					// The largest rate and burst that were ever in force: a
					// coarse cap here, the exact piecewise one is sim's.
					allow := maxBurst[id] + grant.Units(float64(maxRate[id])*d.at.Sub(ds[i].at).Seconds()) + 1
					if sum > allow {
						t.Fatalf("tenant %s: %d units deducted in %v, at most %d", id, sum, d.at.Sub(ds[i].at), allow)
					}
				}
			}
		}
	})
}

// TestRefusalsCostNoWrites: a flood of denials, stale ids and conflicts commits
// nothing.
func TestRefusalsCostNoWrites(t *testing.T) {
	w := newWorld(t)
	w.put("t", withGrants(plain(1, time.Hour, 10), 5, 1, time.Minute))
	a, b := w.join("a"), w.join("b")
	if got := w.ask(grantOf("t", a, 1, 5, 1, 0)); got.Units != 5 {
		t.Fatal(got)
	}
	w.check("t", 5)
	before := w.store.commits
	for i := range 1000 {
		if got := w.check("t", 1); got.Verdict != grant.Deny {
			t.Fatal(got)
		}
		w.ask(grantOf("t", b, grant.GrantID(i+1), 3, 1, 0)) // no room: a has all of N*q
		w.ask(grantOf("t", a, 1, 4, 1, 0))                  // conflict
		w.ask(grantOf("t", a, 1, 5, 1, 0))                  // replay
		w.send(checkOf("nobody", a, 1, "op", 1))
	}
	if w.store.commits != before {
		t.Errorf("%d commits for refusals", w.store.commits-before)
	}
}

// TestOneTenantCannotFillTheInbox: with a flood of one tenant waiting, another
// one's call is taken, and decided in the first round.
func TestOneTenantCannotFillTheInbox(t *testing.T) {
	w := newWorld(t)
	w.cfg.MaxInbox, w.cfg.MaxBatch = 64, 8
	w.load()
	w.put("hot", plain(1, time.Second, 1000))
	w.put("cold", plain(1, time.Second, 1000))
	refused := 0
	for i := range 1000 {
		r, ok := w.node.Offer(authority.Call{Caller: i, Check: checkOf("hot", inc("x"), uint64(i+1), "op", 1)})
		if !ok {
			refused++
			if r.Check == nil || r.Check.Verdict != grant.Undecided || r.Check.Reason != grant.Overloaded || r.Caller != i {
				t.Fatalf("refusal %+v", r)
			}
		}
	}
	if refused != 1000-32 {
		t.Errorf("the flood got %d places of 64, want half", 1000-refused)
	}
	w.offer(authority.Call{Caller: "cold", Check: checkOf("cold", inc("y"), 1, "op", 1)})
	records := w.node.Step(w.reading())
	w.node.Done(w.store.Commit(7, records))
	for _, r := range w.node.Replies() {
		if r.Caller == "cold" {
			return
		}
	}
	t.Error("the cold tenant was not decided in the first step of 8")
}

// TestDeadlinePassed: a call that is stepped after its deadline deducts nothing.
func TestDeadlinePassed(t *testing.T) {
	w := newWorld(t)
	w.put("t", plain(1, time.Hour, 10))
	r := checkOf("t", inc("x"), 1, "op", 4)
	w.offer(authority.Call{Caller: "c", Deadline: w.reading().Mono + 5, Check: r})
	w.now += 6
	got := w.step()
	if len(got) != 1 || got[0].Check.Verdict != grant.Undecided || got[0].Check.Reason != grant.Deadline {
		t.Fatalf("%+v", got)
	}
	if s := w.state("t"); s.Ordinary.Level != 10 {
		t.Errorf("level %d after an undecided Check, want 10", s.Ordinary.Level)
	}
}
