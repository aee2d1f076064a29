package agent

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// The word of a Wallet: units (40 bits), one bit "somebody waits", and the
// generation of the slot that says how long they live (23 bits).
const (
	genBits  = 23
	genMask  = 1<<genBits - 1
	waitBit  = 1 << genBits
	unitBits = genBits + 1
)

// Wallet holds the units of one (tenant, incarnation, account): one balance
// and one expiry. Time never adds to it. Take may be called at any time from
// any goroutine; the other methods are serialised by the caller.
//
// Invariants, tested by Check:
//
//  1. 0 <= balance <= grant.MaxQuantum, in one word with the generation.
//  2. The slot of generation g is g&1. It is written before the word moves to
//     g and not again before the word has left g, so whoever read a slot that
//     was overwritten meanwhile fails its compare-and-swap.
//  3. Only Credit raises the balance, and it moves the generation: a word that
//     has the value read before stands for the same units of the same life.
//  4. credited = spent + dropped + balance, all of them at least zero.
//  5. A closed wallet holds nothing and is never credited again.
//
// One balance, not a list of grants with an expiry each: two grants lying side
// by side would need more than one word, and the authority could not bound what
// is outstanding by what it was told last.
type Wallet struct {
	word  atomic.Uint64
	takes atomic.Uint64 // Takes that were not refused; in the word's cache line

	slots     [2]slot
	tolerance time.Duration
	low       atomic.Int64 // low-water mark; disarmed below zero
	dearest   atomic.Int64 // largest cost that was taken since the caller reset it

	// Written on the rare path of a Take that finds the balance dead.
	dropped [NumDrops]atomic.Int64

	// The serialised side's.
	credited grant.Units
	closed   bool
}

// slot says how long the units of one generation live.
type slot struct {
	expiry atomic.Int64 // Reading.Mono
	offset atomic.Int64 // Wall-Mono when the credited request was first sent
}

// Refusal says why a Take took nothing.
type Refusal uint8

const (
	NotRefused Refusal = iota
	Short              // too little
	Queued             // somebody waits: queue behind
	Expired            // the ttl ran out; the balance is dropped
	Distrusted         // the clocks moved against each other; the balance is dropped
)

// Taken is the outcome of a Take.
type Taken struct {
	Left Units // balance after it
	Why  Refusal
	Low  bool // an admission left less than the low-water mark
}

// Units is short for the currency.
type Units = grant.Units

func wordUnits(word uint64) Units { return Units(word >> unitBits) }

// Init sets the tolerance and disarms the low-water mark. It must come before
// any other use.
func (w *Wallet) Init(tolerance time.Duration) {
	w.tolerance = tolerance
	w.low.Store(-1)
}

// Take spends cost units, all or nothing, in one compare-and-swap. It compares
// now with the expiry and with the clocks' offset at the first sending of the
// request whose answer was credited; a balance that fails is dropped as a
// whole. A cost of zero looks without spending and is not held up by waiters.
//
// The count of takes comes first although it is the less important: an addition
// fetches the cache line for writing, where a load would fetch it for reading
// and the swap would have to fetch it again. Two cores on one wallet run twice
// as fast this way.
func (w *Wallet) Take(now Reading, cost Units) Taken {
	w.takes.Add(1)
	taken := w.take(now, cost, waitBit)
	if taken.Why != NotRefused {
		w.takes.Add(^uint64(0))
	}
	return taken
}

// Look is the balance that is alive at now. What is dead is dropped. Serialised.
func (w *Wallet) Look(now Reading) Units { return w.take(now, 0, 0).Left }

// TakeFirst is Take for the request at the head of the queue, which the
// waiters' bit does not stop, and which is not counted. Serialised.
func (w *Wallet) TakeFirst(now Reading, cost Units) Taken { return w.take(now, cost, 0) }

func (w *Wallet) take(now Reading, cost Units, queue uint64) Taken {
	for {
		word := w.word.Load()
		have := wordUnits(word)
		switch {
		case have < cost || cost < 0:
			return Taken{Left: have, Why: Short}
		case have == 0:
			return Taken{} // a look at nothing
		case word&queue != 0 && cost > 0:
			return Taken{Left: have, Why: Queued}
		}
		s := &w.slots[word&1]
		if why := s.dead(now, w.tolerance); why != NotRefused {
			if w.word.CompareAndSwap(word, word&(waitBit|genMask)) {
				w.dropped[why.drop()].Add(int64(have))
				return Taken{Why: why}
			}
			continue
		}
		if cost == 0 {
			if w.word.Load() != word {
				continue // the slot may have been of another life
			}
			return Taken{Left: have}
		}
		if w.word.CompareAndSwap(word, word-uint64(cost)<<unitBits) {
			if int64(cost) > w.dearest.Load() {
				w.dearest.Store(int64(cost)) // a lost race loses a hint
			}
			left := have - cost
			return Taken{Left: left, Low: int64(left) < w.low.Load()}
		}
	}
}

// dead says why units of the slot cannot be spent at the reading.
func (s *slot) dead(now Reading, tolerance time.Duration) Refusal {
	if int64(now.Mono) >= s.expiry.Load() {
		return Expired
	}
	if moved(grant.Instant(s.offset.Load()), now.offset(), tolerance) {
		return Distrusted
	}
	return NotRefused
}

// drop is the cause under which a refusal's units are counted.
func (r Refusal) drop() Drop {
	if r == Distrusted {
		return DropClock
	}
	return DropExpired
}

// offset is Wall-Mono, an instant of a clock that stands still as long as
// neither of the two steps and the machine does not sleep.
func (r Reading) offset() grant.Instant { return r.Wall - r.Mono }

// moved reports whether two offsets differ by more than the tolerance.
func moved(before, after grant.Instant, tolerance time.Duration) bool {
	d := after - before
	return d > grant.Instant(tolerance) || -d > grant.Instant(tolerance) || d == -d && d != 0
}

// Credit adds the units of one answer and renews the life of everything held:
// until expiry, trusted while the clocks' offset stays within tolerance of
// offset. What was already dead at now is dropped first: an answer does not
// raise the dead. u is 1 to grant.MaxQuantum; what exceeds the capacity of the
// wallet is dropped as DropReplaced.
func (w *Wallet) Credit(now Reading, u Units, expiry, offset grant.Instant) {
	w.credited += u
	if w.closed {
		w.dropped[DropClosed].Add(int64(u))
		return
	}
	w.Look(now)
	next := (w.word.Load() + 1) & genMask // only Credit moves the generation
	s := &w.slots[next&1]
	s.expiry.Store(int64(expiry))
	s.offset.Store(int64(offset))
	for {
		word := w.word.Load()
		have := wordUnits(word)
		add := min(u, grant.MaxQuantum-have)
		if w.word.CompareAndSwap(word, uint64(have+add)<<unitBits|word&waitBit|next) {
			if add < u {
				w.dropped[DropReplaced].Add(int64(u - add))
			}
			return
		}
	}
}

// Miss counts units of an answer that must not be credited.
func (w *Wallet) Miss(u Units, cause Drop) {
	w.credited += u
	w.dropped[cause].Add(int64(u))
}

// DropAll makes everything held unusable.
func (w *Wallet) DropAll(cause Drop) {
	for {
		word := w.word.Load()
		if w.word.CompareAndSwap(word, word&(waitBit|genMask)) {
			w.dropped[cause].Add(int64(wordUnits(word)))
			return
		}
	}
}

// Queue sets or clears the waiters' bit.
func (w *Wallet) Queue(waiting bool) {
	if waiting {
		w.word.Or(waitBit)
	} else {
		w.word.And(^uint64(waitBit))
	}
}

// Close drops everything for good.
func (w *Wallet) Close() {
	w.closed = true
	w.DropAll(DropClosed)
}

// Balance is what the word says, dead or alive.
func (w *Wallet) Balance() Units { return wordUnits(w.word.Load()) }

// Expiry is when the balance dies, in Reading.Mono; grant.Never when nothing
// is held.
func (w *Wallet) Expiry() grant.Instant {
	word := w.word.Load()
	if wordUnits(word) == 0 {
		return grant.Never
	}
	return grant.Instant(w.slots[word&1].expiry.Load())
}

// Arm sets the low-water mark; below zero disarms it.
func (w *Wallet) Arm(low Units) {
	if w.low.Load() != int64(low) {
		w.low.Store(int64(low))
	}
}

// spent is credited less dropped less held. While a Take drops, its units may
// count as spent for an instant.
func (w *Wallet) spent() Units {
	spent := w.credited - w.Balance()
	for i := range w.dropped {
		spent -= Units(w.dropped[i].Load())
	}
	return max(0, spent)
}

// count adds the wallet's sums to s.
func (w *Wallet) count(s *AccountStats) {
	s.Granted, s.Held, s.Spent = w.credited, w.Balance(), w.spent()
	for i := range w.dropped {
		s.Dropped[i] = Units(w.dropped[i].Load())
	}
}

// Check tests the invariants; it must not run beside a Take.
func (w *Wallet) Check() error {
	rest := w.credited - w.Balance()
	for i := range w.dropped {
		d := Units(w.dropped[i].Load())
		if d < 0 {
			return fmt.Errorf("wallet: invariant 4: %d units dropped as %v", d, Drop(i))
		}
		rest -= d
	}
	switch {
	case w.Balance() < 0 || w.Balance() > grant.MaxQuantum:
		return fmt.Errorf("wallet: invariant 1: balance %d", w.Balance())
	case rest < 0:
		return fmt.Errorf("wallet: invariant 4: %d units more held and dropped than credited", -rest)
	case w.closed && w.Balance() != 0:
		return fmt.Errorf("wallet: invariant 5: closed with a balance of %d", w.Balance())
	}
	return nil
}
