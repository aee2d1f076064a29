package sim

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// operation is one asking of one tenant's bucket, and its outcome.
type operation struct {
	grant       bool
	cost        grant.Units // of a Check; wanted by a grant
	denied      bool
	units       grant.Units // that were taken
	first, last grant.Instant
}

// bucketModel is a token bucket as one would write it down: sequential, without
// owners, ids, commits and crashes, full at an instant and refilled since. The
// state is what was taken. A grant takes what there is up to what it wants.
func bucketModel(burst, perSecond grant.Units, since grant.Instant) porcupine.Model {
	level := func(taken grant.Units, at grant.Instant) grant.Units {
		came, _ := grant.Rate{Units: perSecond, Per: time.Second}.AccrueFloor(at.Sub(since), 0)
		return burst + came - taken
	}
	return porcupine.Model{
		Init: func() any { return grant.Units(0) },
		Step: func(state, input, output any) (bool, any) {
			taken, op := state.(grant.Units), output.(operation)
			most := level(taken, op.last)
			switch {
			case op.denied && perSecond > 0:
				// While grants are parked, Checks get half of the refill: a denial
				// says nothing about the whole level.
				return true, state
			case op.denied && op.grant:
				return most == 0, state
			case op.denied:
				return op.cost > most, state
			case op.grant && perSecond == 0:
				return op.units == min(op.cost, most) && op.units > 0, taken + op.units
			}
			return op.units <= most, taken + op.units
		},
		Equal: func(a, b any) bool { return a == b },
		DescribeOperation: func(_, output any) string {
			op := output.(operation)
			return fmt.Sprintf("grant %v, asked %d, got %d, denied %v", op.grant, op.cost, op.units, op.denied)
		},
	}
}

// asker is a client that asks one thing after another, each until it hears
// something definite, with the same id.
type asker struct {
	w    *World
	inc  grant.Incarnation
	id   int
	seq  uint64
	left int
	all  *[]porcupine.Operation
	rng  interface{ IntN(int) int }
}

func (a *asker) next() {
	if a.left--; a.left < 0 {
		return
	}
	a.seq++
	op := operation{grant: a.rng.IntN(2) == 0, cost: 1 + grant.Units(a.rng.IntN(5)), first: a.w.Now()}
	var call authority.Call
	if op.grant {
		r := grant.GrantRequest{Tenant: acme, Incarnation: a.inc, ID: grant.GrantID(a.seq), Want: op.cost, Min: 1}
		r.Sum = r.Fingerprint()
		call.Grant = &r
	} else {
		r := grant.CheckRequest{Tenant: acme, Class: "c", Count: op.cost, Attempt: grant.Attempt{Incarnation: a.inc, Seq: a.seq}}
		r.Sum = r.Fingerprint()
		call.Check = &r
	}
	a.send(call, op)
}

// send asks, and asks again after a while without a definite answer.
func (a *asker) send(call authority.Call, op operation) {
	latency := time.Duration(1 + a.rng.IntN(int(2*time.Millisecond)))
	over := false
	a.w.After(latency, func() {
		a.w.Center.Call(grant.PartitionOf(acme), call, func(r authority.Reply) {
			if over {
				return
			}
			switch {
			case r.Grant != nil && r.Grant.Result.Closes():
				op.denied, op.units = r.Grant.Result != grant.Granted, r.Grant.Units
			case r.Check != nil && r.Check.Verdict == grant.Allow:
				op.units = r.Check.Cost
			case r.Check != nil && r.Check.Verdict == grant.Deny:
				op.denied = true
			default:
				return
			}
			over = true
			a.w.After(time.Duration(1+a.rng.IntN(int(2*time.Millisecond))), func() {
				op.last = a.w.Now()
				*a.all = append(*a.all, porcupine.Operation{ClientId: a.id, Input: op.cost, Output: op, Call: int64(op.first), Return: int64(op.last)})
				a.w.After(time.Duration(1+a.rng.IntN(int(3*time.Millisecond))), a.next)
			})
		})
	})
	a.w.After(60*time.Millisecond, func() {
		if !over {
			over = true
			a.send(call, op)
		}
	})
}

// Concurrent Checks and grants on one tenant are linearizable: some order of
// them, each between its asking and its answer, is what a sequential bucket
// would have done, through crashes and commits of unknown outcome.
func TestLinearizable(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 10
	}
	taken := 0
	for seed := range uint64(rounds) {
		var perSecond grant.Units
		cfg := DefaultConfig(seed)
		cfg.Disk.Latency = 2 * time.Millisecond
		if seed%3 == 2 { // refill, without crashes: they stop ledger time
			perSecond = 100
		} else {
			cfg.CommitEndsProcess = seed%2 == 0
		}
		w := newWorld(t, cfg, 0)
		const burst = 40
		put(t, w, acme, policy(0, burst, 1000, 1000, 300*time.Millisecond))
		since := w.Now()
		if perSecond > 0 { // the same level in a bucket that is never full
			put(t, w, acme, policy(perSecond, 1_000_000, 1000, 1000, 300*time.Millisecond))
		}
		if perSecond == 0 {
			w.Disk.cfg.UnknownPPM = 100_000
		}
		var all []porcupine.Operation
		rng := w.Source("askers")
		for i := range 6 {
			a := &asker{w: w, inc: inc(i), id: i, left: 8, all: &all, rng: rng}
			w.Registry.register(a.inc, grant.Owner(fmt.Sprintf("asker%d", i)))
			w.Registry.attach(a.inc)
			w.After(20*time.Millisecond, a.next)
		}
		if perSecond == 0 {
			w.Haunt(Faults{CenterCrash: 100 * time.Millisecond, DownMost: 50 * time.Millisecond}, []grant.TenantID{acme}, w.Now().Add(2*time.Second))
		}
		run(t, w, 20*time.Second)
		if len(all) != 6*8 {
			t.Fatalf("seed %d: %d of 48 operations ended", seed, len(all))
		}
		for _, op := range all {
			taken += int(op.Output.(operation).units)
		}
		result, info := porcupine.CheckOperationsVerbose(bucketModel(burst, perSecond, since), all, 20*time.Second)
		if result != porcupine.Ok {
			picture := filepath.Join(t.ArtifactDir(), "history.html")
			f, err := os.Create(picture)
			if err == nil {
				err = porcupine.Visualize(bucketModel(burst, perSecond, since), info, f)
				f.Close()
			}
			t.Fatalf("seed %d: the history is not linearizable (%v); picture: %s (%v), kept with -artifacts", seed, result, picture, err)
		}
	}
	if taken < rounds*35 {
		t.Errorf("only %d units were taken in %d histories: they test little", taken, rounds)
	}
}
