package gate

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/proto/grant"
)

const (
	guardEvery = 100 * time.Millisecond
	// guardLife: the wallets are not trusted when the guard has not looked for
	// this long.
	guardLife = 300 * time.Millisecond
	// rawAnchor is how long MONOTONIC may be slewed against MONOTONIC_RAW
	// before the comparison begins anew: NTP slews at most 500 ppm, 5 ms in it.
	rawAnchor = 10 * time.Second
	// sharpness is the widest gap between two readings of MONOTONIC around a
	// kernel reading that is believed at once; a preempted reading is repeated.
	sharpness = 5 * time.Millisecond
)

// Clock is the source of time. The zero value is the system's.
type Clock struct {
	// Now is one look at monotonic and wall time.
	Now func() agent.Reading
	// Kernel reads CLOCK_BOOTTIME and CLOCK_MONOTONIC_RAW. Nil beside a Now of
	// the caller's: only wall and monotonic time are compared.
	Kernel func() (boot, raw grant.Instant, err error)
}

func kernelClocks() (boot, raw grant.Instant, err error) {
	var b, r unix.Timespec
	if err = unix.ClockGettime(unix.CLOCK_BOOTTIME, &b); err == nil {
		err = unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &r)
	}
	return grant.Instant(b.Nano()), grant.Instant(r.Nano()), err
}

// guard notices that a clock stepped or that the machine slept.
type guard struct {
	clock     Clock
	base      time.Time     // of the system's readings
	origin    grant.Instant // CLOCK_MONOTONIC at base
	tolerance time.Duration

	fresh  atomic.Int64 // monotonic instant up to which the last look is good
	moved  atomic.Int64 // instant of the last move seen
	offset atomic.Int64 // wall minus mono of the last look
	moves  atomic.Uint64

	mu      sync.Mutex
	anchors bool
	boot    time.Duration // boot minus mono when anchored
	raw     time.Duration // raw minus mono when anchored
	rawAt   grant.Instant
}

func newGuard(c Clock, tolerance time.Duration) *guard {
	if c.Now == nil && c.Kernel == nil {
		c.Kernel = kernelClocks
	}
	g := &guard{clock: c, tolerance: tolerance}
	g.base, g.origin = monotonicNow()
	now := g.now()
	g.offset.Store(int64(now.Wall - now.Mono))
	g.moved.Store(int64(now.Mono) - 1)
	return g
}

func (g *guard) now() agent.Reading {
	if g.clock.Now != nil {
		return g.clock.Now()
	}
	t := time.Now()
	return agent.Reading{Mono: g.origin + grant.Instant(t.Sub(g.base)), Wall: grant.Instant(t.UnixNano())}
}

// monotonicNow ties the runtime's monotonic time, whose origin is hidden, to
// the kernel's CLOCK_MONOTONIC, so that the instants of all processes of a
// machine can be compared. Of a few readings the least disturbed counts.
func monotonicNow() (time.Time, grant.Instant) {
	var base time.Time
	var origin grant.Instant
	best := time.Duration(-1)
	for range 8 {
		before := time.Now()
		var ts unix.Timespec
		if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
			break
		}
		if took := time.Since(before); best < 0 || took < best {
			best, base, origin = took, before.Add(took/2), grant.Instant(ts.Nano())
		}
	}
	if best < 0 {
		return time.Now(), grant.Instant(time.Hour)
	}
	return base, origin
}

// look compares the clocks and calls distrust when one moved, before the
// wallets count as trusted again. Without force it does nothing when another
// look is still good.
func (g *guard) look(force bool, distrust func(agent.Reading)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	if !force && int64(now.Mono) < g.fresh.Load() {
		return
	}
	off := time.Duration(now.Wall - now.Mono)
	moved := apart(off, time.Duration(g.offset.Load()), g.tolerance)
	g.offset.Store(int64(off))
	if g.clock.Kernel != nil {
		moved = g.compare(&now) || moved
	}
	if moved {
		g.moves.Add(1)
		g.moved.Store(int64(now.Mono))
		distrust(now)
	}
	g.fresh.Store(int64(now.Mono.Add(guardLife)))
}

// compare reads the kernel's clocks between two monotonic readings: the reader
// may be preempted anywhere, and a late reading is no step.
func (g *guard) compare(now *agent.Reading) (moved bool) {
	var boot, raw, before, after grant.Instant
	for range 4 {
		before = g.now().Mono
		b, r, err := g.clock.Kernel()
		if err != nil {
			return true // nothing can be said for the clocks: the worse one
		}
		*now = g.now()
		boot, raw, after = b, r, now.Mono
		if after.Sub(before) <= sharpness {
			break
		}
	}
	// The true offsets lie between these two.
	bootLow, bootHigh := boot.Sub(after), boot.Sub(before)
	rawLow, rawHigh := raw.Sub(after), raw.Sub(before)
	outside := func(ref, low, high time.Duration) bool {
		return ref < low-g.tolerance || ref > high+g.tolerance
	}
	if g.anchors {
		moved = outside(g.boot, bootLow, bootHigh) || outside(g.raw, rawLow, rawHigh)
	}
	if !g.anchors || moved {
		g.anchors = true
		g.boot, g.raw, g.rawAt = bootLow, rawLow, after
	} else if after.Sub(g.rawAt) > rawAnchor {
		g.raw, g.rawAt = rawLow, after
	}
	return moved
}

func apart(a, b, tolerance time.Duration) bool {
	d := a - b
	return d > tolerance || d < -tolerance
}

// steady reports whether no clock moved since the instant, as far as one can
// tell without a system call.
func (g *guard) steady(now agent.Reading, since grant.Instant) bool {
	return g.moved.Load() < int64(since) &&
		!apart(time.Duration(now.Wall-now.Mono), time.Duration(g.offset.Load()), g.tolerance)
}
