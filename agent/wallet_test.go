package agent

import (
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

const ms = grant.Instant(time.Millisecond)

// at is a reading with the wall clock in step.
func at(mono grant.Instant) Reading { return Reading{Mono: mono, Wall: mono + 1000*ms} }

func newWallet(tb testing.TB) *Wallet {
	w := new(Wallet)
	w.Init(100 * time.Millisecond)
	tb.Cleanup(func() {
		if err := w.Check(); err != nil {
			tb.Error(err)
		}
	})
	return w
}

// TestWalletRefusals: each reason not to spend, and that a refusal for want of
// units changes nothing.
func TestWalletRefusals(t *testing.T) {
	offset := at(0).offset()
	for _, c := range []struct {
		name    string
		now     Reading
		cost    Units
		waiting bool
		want    Taken
		after   Units
		cause   Drop
		dropped Units
	}{
		{name: "all of it", now: at(99), cost: 10, want: Taken{Left: 0}, after: 0},
		{name: "one too many", now: at(99), cost: 11, want: Taken{Left: 10, Why: Short}, after: 10},
		{name: "largest cost", now: at(99), cost: grant.MaxUnits, want: Taken{Left: 10, Why: Short}, after: 10},
		{name: "2^40: more than fits the word", now: at(99), cost: 1 << 40, want: Taken{Left: 10, Why: Short}, after: 10},
		{name: "negative", now: at(99), cost: -1, want: Taken{Left: 10, Why: Short}, after: 10},
		{name: "a look", now: at(99), cost: 0, want: Taken{Left: 10}, after: 10},
		{name: "a look past the queue", now: at(99), cost: 0, waiting: true, want: Taken{Left: 10}, after: 10},
		{name: "behind a waiter", now: at(99), cost: 1, waiting: true, want: Taken{Left: 10, Why: Queued}, after: 10},
		{name: "at the expiry", now: at(100), cost: 1, want: Taken{Why: Expired}, cause: DropExpired, dropped: 10},
		{name: "a look at the expiry", now: at(100), cost: 0, want: Taken{Why: Expired}, cause: DropExpired, dropped: 10},
		{name: "wall ahead within tolerance", now: Reading{50, 50 + 1100*ms}, cost: 1, want: Taken{Left: 9}, after: 9},
		{name: "wall ahead", now: Reading{50, 51 + 1100*ms}, cost: 1, want: Taken{Why: Distrusted}, cause: DropClock, dropped: 10},
		{name: "wall behind within tolerance", now: Reading{50, 50 + 900*ms}, cost: 1, want: Taken{Left: 9}, after: 9},
		{name: "wall behind", now: Reading{50, 49 + 900*ms}, cost: 1, want: Taken{Why: Distrusted}, cause: DropClock, dropped: 10},
		{name: "wall at the end of time", now: Reading{50, math.MaxInt64}, cost: 1, want: Taken{Why: Distrusted}, cause: DropClock, dropped: 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWallet(t)
			w.Credit(at(0), 10, 100, offset)
			w.Queue(c.waiting)
			if got := w.Take(c.now, c.cost); got != c.want {
				t.Errorf("Take = %+v, want %+v", got, c.want)
			}
			if got := w.Balance(); got != c.after {
				t.Errorf("balance %d, want %d", got, c.after)
			}
			var s AccountStats
			w.count(&s)
			if s.Dropped[c.cause] != c.dropped {
				t.Errorf("dropped as %v: %d, want %d", c.cause, s.Dropped[c.cause], c.dropped)
			}
		})
	}
}

// TestWalletNeverRefills: however long time passes, the balance only falls.
func TestWalletNeverRefills(t *testing.T) {
	w := newWallet(t)
	w.Credit(at(0), 10, grant.Never, at(0).offset())
	for i := range grant.Instant(10) {
		if got := w.Take(at(i*3600*1000*ms), 1); got.Why != NotRefused || got.Left != 9-Units(i) {
			t.Fatalf("take %d: %+v", i, got)
		}
	}
	if got := w.Take(at(1<<60), 1); got.Why != Short {
		t.Fatalf("an empty wallet gave %+v", got)
	}
}

// TestWalletRenews: one balance and one expiry. A credit renews what is held,
// shortens it too if it must, and does not raise what died before it came.
func TestWalletRenews(t *testing.T) {
	w := newWallet(t)
	offset := at(0).offset()
	w.Credit(at(0), 10, 100, offset)
	w.Credit(at(99), 1, 300, offset)
	if got := w.Take(at(299), 11); got.Why != NotRefused {
		t.Fatalf("renewed units: %+v", got)
	}
	w.Credit(at(299), 10, 400, offset)
	w.Credit(at(300), 5, 350, offset)
	if got := w.Take(at(350), 1); got.Why != Expired {
		t.Fatalf("after the shorter expiry: %+v", got)
	}
	w.Credit(at(400), 10, 500, offset)
	w.Credit(at(500), 1, 600, offset)
	if got := w.Look(at(500)); got != 1 {
		t.Fatalf("%d units live after the first 10 died: want 1", got)
	}
	w.Credit(Reading{501, 501 + 2000*ms}, 2, 700, 2000*ms) // the clock stepped since
	if got := w.Look(Reading{501, 501 + 2000*ms}); got != 2 {
		t.Fatalf("%d units after a step: want the 2 whose request was sent after it", got)
	}
}

// TestWalletFullAndClosed: the capacity is 2^40-1, and a closed wallet stays
// empty.
func TestWalletFullAndClosed(t *testing.T) {
	w := newWallet(t)
	for range 3 {
		w.Credit(at(0), grant.MaxQuantum, 100, at(0).offset())
	}
	if got := w.Take(at(1), grant.MaxQuantum); got != (Taken{}) {
		t.Fatalf("Take all = %+v", got)
	}
	w.Credit(at(0), 5, 100, at(0).offset())
	w.Close()
	w.Credit(at(0), 5, 100, at(0).offset())
	if got := w.Take(at(1), 1); got.Why != Short || got.Left != 0 {
		t.Fatalf("closed: %+v", got)
	}
}

// TestWalletLowWater: crossing the mark is reported by admissions only, and not
// while disarmed.
func TestWalletLowWater(t *testing.T) {
	w := newWallet(t)
	w.Credit(at(0), 10, 100, at(0).offset())
	for i, c := range []struct {
		mark, cost Units
		low        bool
	}{{-1, 1, false}, {8, 1, false}, {8, 1, true}, {8, 0, false}, {8, 99, false}, {-1, 7, false}} {
		w.Arm(c.mark)
		if got := w.Take(at(1), c.cost); got.Low != c.low {
			t.Errorf("step %d: %+v", i, got)
		}
	}
}

// TestWalletModel compares the one word with a plain struct on random
// histories of one goroutine.
func TestWalletModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := new(Wallet)
		w.Init(100 * time.Millisecond)
		var m walletModel
		var wait bool
		var now Reading
		t.Repeat(map[string]func(*rapid.T){
			"time": func(t *rapid.T) {
				d := grant.Instant(rapid.Int64Range(0, 60).Draw(t, "ms")) * ms
				now = Reading{now.Mono + d, now.Wall + d}
			},
			"step": func(t *rapid.T) { now.Wall += grant.Instant(rapid.Int64Range(-120, 120).Draw(t, "ms")) * ms },
			"credit": func(t *rapid.T) {
				u := rapid.Int64Range(1, 20).Draw(t, "units")
				life := rapid.Int64Range(0, 200).Draw(t, "ms") * int64(ms)
				if m.dead(now) {
					m.units = 0
				}
				m.units, m.expiry, m.offset = m.units+u, int64(now.Mono)+life, int64(now.offset())
				m.credited += u
				w.Credit(now, Units(u), now.Mono+grant.Instant(life), now.offset())
			},
			"queue": func(t *rapid.T) { wait = rapid.Bool().Draw(t, "waiting"); w.Queue(wait) },
			"drop":  func(t *rapid.T) { m.units = 0; w.DropAll(DropRefused) },
			"take": func(t *rapid.T) {
				cost := rapid.Int64Range(0, 15).Draw(t, "cost")
				first := rapid.Bool().Draw(t, "first")
				take := w.Take
				if first {
					take = w.TakeFirst
				}
				want := cost <= m.units && (first || !wait || cost == 0) && (m.units == 0 || !m.dead(now))
				if got := take(now, Units(cost)); (got.Why == NotRefused) != want {
					t.Fatalf("take %d (first %v) of %+v at %v: %+v", cost, first, m, now, got)
				}
				if want {
					m.units, m.spent = m.units-cost, m.spent+cost
				}
			},
			"": func(t *rapid.T) {
				if err := w.Check(); err != nil {
					t.Fatal(err)
				}
				if int64(w.Look(now)) != m.live(now) {
					t.Fatalf("holds %d, want %d", w.Look(now), m.live(now))
				}
				if m.dead(now) {
					m.units = 0 // the look dropped it
				}
				if int64(w.spent()) != m.spent || int64(w.credited) != m.credited {
					t.Fatalf("spent %d of %d, want %d of %d", w.spent(), w.credited, m.spent, m.credited)
				}
			},
		})
	})
}

// walletModel is the wallet without the tricks.
type walletModel struct{ units, expiry, offset, credited, spent int64 }

func (m walletModel) live(now Reading) int64 {
	if m.dead(now) {
		return 0
	}
	return m.units
}

func (m walletModel) dead(now Reading) bool {
	off := int64(now.offset()) - m.offset
	return int64(now.Mono) >= m.expiry || off > 100*int64(ms) || off < -100*int64(ms)
}

// TestWalletRace lets takers run against credits, expiries, drops and the
// waiters' bit. No unit is spent twice: what the takers got is what the wallet
// counts as spent, and no taker whose reading lies past every expiry, or from a
// machine that slept, gets anything. Run with -race.
func TestWalletRace(t *testing.T) {
	w := newWallet(t)
	var clock, got, late atomic.Int64
	stop := make(chan struct{})
	var takers sync.WaitGroup
	for g := range 4 {
		takers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				now := at(grant.Instant(clock.Load()))
				bad := g == 3 && i%64 < 2
				switch {
				case bad && i%64 == 0: // the machine slept
					now.Wall += grant.Instant(time.Hour)
				case bad: // past every expiry
					now = at(now.Mono + 1<<40)
				}
				cost := Units(i % 4)
				if taken := w.Take(now, cost); taken.Why == NotRefused {
					got.Add(int64(cost))
					if bad && cost > 0 {
						late.Add(int64(cost))
					}
				} else {
					runtime.Gosched()
				}
			}
		})
	}
	for i := 0; i < 30_000 || got.Load() < 500; i++ {
		if i%16 == 0 {
			runtime.Gosched() // the takers get their turn on one processor too
		}
		now := at(grant.Instant(clock.Add(1)))
		switch i % 100 {
		case 7:
			w.Queue(true)
		case 9:
			w.Queue(false)
		case 50:
			w.DropAll(DropRefused)
		case 70:
			clock.Add(40) // everything expires
		case 71:
			w.Look(now)
		default:
			w.Credit(now, Units(1+i%3), now.Mono+20, now.offset())
		}
	}
	close(stop)
	takers.Wait()
	if late.Load() != 0 {
		t.Errorf("%d units were spent after their expiry or under a clock that had moved by an hour", late.Load())
	}
	if spent := int64(w.spent()); spent != got.Load() || spent == 0 {
		t.Errorf("the wallet counts %d units as spent, the takers got %d", spent, got.Load())
	}
}

// TestWalletStaleSlot: a taker that read the slot of a life that was replaced
// meanwhile takes nothing by it. The interleaving is forced: two credits
// overwrite the slot between the taker's look at the word and its swap.
func TestWalletStaleSlot(t *testing.T) {
	w := newWallet(t)
	offset := at(0).offset()
	w.Credit(at(0), 5, 100, offset)
	word := w.word.Load()
	w.Credit(at(1), 1, 200, offset)
	w.Credit(at(2), 1, 300, offset) // the slot of the first life now says 300
	w.DropAll(DropRefused)
	w.Credit(at(3), 5, 100, offset)
	if w.word.Load() == word || w.word.CompareAndSwap(word, 0) {
		t.Fatal("a word of an earlier life came back")
	}
}
