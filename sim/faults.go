package sim

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Faults are what goes wrong by chance: the mean time between two of a kind,
// over the whole world; zero: never.
type Faults struct {
	CenterCrash time.Duration // down for up to DownMost
	StepDown    time.Duration // of the center, in order; half of the last commits fail
	CenterPause time.Duration // half of them with the machine asleep
	Kill        time.Duration // of a gateway, started again as a new incarnation
	Pause       time.Duration // of a gateway's process: a zombie until it goes on
	Sleep       time.Duration // of a gateway's machine: MONOTONIC stands still
	Nap         time.Duration // a sleep below the tolerance
	WallStep    time.Duration // of a gateway's wall clock
	Drift       time.Duration // another rate error, within rho
	Break       time.Duration // of a stream
	Hiccup      time.Duration // a lease runs out though its stream lives
	Fence       time.Duration // an operator fences a gateway
	Drain       time.Duration // a gateway is drained, and started again
	GiveUp      time.Duration // a client hangs up

	DownMost  time.Duration // of what is dead
	PauseMost time.Duration // of what stands still
}

// Haunt lets the faults happen from now to until. What stands still then goes
// on, and what is dead is started, within DownMost and PauseMost.
func (w *World) Haunt(f Faults, tenants []grant.TenantID, until grant.Instant) {
	rng := w.source("faults")
	every := func(mean time.Duration, strike func(rng *rand.Rand)) {
		if mean <= 0 {
			return
		}
		own := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
		var next func()
		next = func() {
			w.After(1+time.Duration(own.ExpFloat64()*float64(mean)), func() {
				if w.now < until {
					strike(own)
					next()
				}
			})
		}
		next()
	}
	upTo := func(rng *rand.Rand, d time.Duration) time.Duration { return 1 + time.Duration(rng.Int64N(int64(d)+1)) }
	some := func(strike func(rng *rand.Rand, g *Gateway)) func(*rand.Rand) {
		return func(rng *rand.Rand) { strike(rng, w.gateways[rng.IntN(len(w.gateways))]) }
	}
	rho := w.cfg.Authority.RhoPPB
	ppb := func(rng *rand.Rand) int64 { return rng.Int64N(2*rho+1) - rho }

	every(f.CenterCrash, func(rng *rand.Rand) {
		w.Center.Crash()
		w.After(upTo(rng, f.DownMost), w.Center.Start)
	})
	every(f.StepDown, func(rng *rand.Rand) {
		if rng.IntN(2) == 0 {
			w.Disk.Next(slices.Repeat([]Fate{Failed}, len(w.Center.order))...)
		}
		w.Center.StepDown()
		w.Disk.next = nil
		w.After(upTo(rng, f.DownMost), w.Center.Start)
	})
	every(f.CenterPause, func(rng *rand.Rand) {
		w.Center.Pause(rng.IntN(2) == 0)
		w.After(upTo(rng, f.PauseMost), w.Center.Resume)
	})
	every(f.Kill, some(func(rng *rand.Rand, g *Gateway) {
		g.Kill()
		w.After(upTo(rng, f.DownMost), g.Start)
	}))
	every(f.Pause, some(func(rng *rand.Rand, g *Gateway) { g.Nap(upTo(rng, f.PauseMost), false) }))
	every(f.Sleep, some(func(rng *rand.Rand, g *Gateway) { g.Nap(upTo(rng, f.PauseMost), true) }))
	every(f.Nap, some(func(rng *rand.Rand, g *Gateway) { g.Nap(upTo(rng, w.cfg.Agent.Tolerance), true) }))
	every(f.WallStep, some(func(rng *rand.Rand, g *Gateway) {
		by := upTo(rng, []time.Duration{time.Millisecond, 200 * time.Millisecond, time.Minute}[rng.IntN(3)])
		if rng.IntN(2) == 0 {
			by = -by
		}
		w.note("%s wall %v", g.Owner, by)
		g.Clock.Step(w.now, by)
	}))
	every(f.Drift, func(rng *rand.Rand) {
		if i := rng.IntN(len(w.gateways) + 1); i < len(w.gateways) {
			p := ppb(rng)
			w.gateways[i].Clock.Drift(w.now, p, p)
			w.gateways[i].Retime()
			return
		}
		w.Center.Clock.Drift(w.now, ppb(rng), ppb(rng))
	})
	every(f.Break, some(func(_ *rand.Rand, g *Gateway) {
		if g.stream != nil {
			g.stream.cut()
		}
	}))
	every(f.Hiccup, some(func(rng *rand.Rand, g *Gateway) { w.Registry.Hiccup(g.inc, upTo(rng, f.DownMost)) }))
	every(f.Fence, some(func(_ *rand.Rand, g *Gateway) { w.Registry.Fence(g.inc) }))
	every(f.Drain, some(func(rng *rand.Rand, g *Gateway) {
		g.Drain(upTo(rng, time.Second))
		w.After(2*time.Second+upTo(rng, f.DownMost), g.Start)
	}))
	every(f.GiveUp, some(func(rng *rand.Rand, g *Gateway) { g.GiveUp(tenants[rng.IntN(len(tenants))]) }))
}
