package sim

import (
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

const billion = 1_000_000_000

// Clock is the set of clocks of one machine, as functions of real time. All
// readings are taken at a real instant that never goes back.
//
// MONOTONIC and MONOTONIC_RAW run at their own rates and stand still while the
// machine sleeps; BOOTTIME is MONOTONIC that counts sleep; wall time runs like
// BOOTTIME and is stepped.
type Clock struct {
	at                    grant.Instant // real instant of the last change
	mono, raw, boot, wall grant.Instant // readings then
	monoPPB, rawPPB       int64         // rate errors, parts per billion
	asleep                bool
}

// newClock starts a machine's clocks at readings of their own, so that nothing
// can work by comparing instants of different machines.
func newClock(now grant.Instant, origin time.Duration, monoPPB, rawPPB int64) *Clock {
	o := grant.Instant(origin)
	return &Clock{at: now, mono: o, raw: o / 2, boot: o, wall: grant.Instant(1_800_000_000*time.Second) + now, monoPPB: monoPPB, rawPPB: rawPPB}
}

// scaled is how far a clock of the rate error gets in dt, rounded toward dt.
func scaled(dt grant.Instant, ppb int64) grant.Instant {
	return dt + dt/billion*grant.Instant(ppb) + dt%billion*grant.Instant(ppb)/billion
}

// settle takes new readings as the base, before anything about the clock changes.
func (c *Clock) settle(now grant.Instant) {
	dt := now - c.at
	if !c.asleep {
		c.mono += scaled(dt, c.monoPPB)
		c.raw += scaled(dt, c.rawPPB)
	}
	c.boot += scaled(dt, c.monoPPB)
	c.wall += scaled(dt, c.monoPPB)
	c.at = now
}

// Step moves the wall clock.
func (c *Clock) Step(now grant.Instant, by time.Duration) {
	c.settle(now)
	c.wall += grant.Instant(by)
}

// Drift sets other rate errors.
func (c *Clock) Drift(now grant.Instant, monoPPB, rawPPB int64) {
	c.settle(now)
	c.monoPPB, c.rawPPB = monoPPB, rawPPB
}

// Sleep stops MONOTONIC and MONOTONIC_RAW until Wake.
func (c *Clock) Sleep(now grant.Instant) { c.settle(now); c.asleep = true }

// Wake ends Sleep.
func (c *Clock) Wake(now grant.Instant) { c.settle(now); c.asleep = false }

// Mono is the reading of MONOTONIC at a real instant.
func (c *Clock) Mono(now grant.Instant) grant.Instant {
	if c.asleep {
		return c.mono
	}
	return c.mono + scaled(now-c.at, c.monoPPB)
}

// Agent is one time.Now() of a process on the machine.
func (c *Clock) Agent(now grant.Instant) agent.Reading {
	return agent.Reading{Mono: c.Mono(now), Wall: c.wall + scaled(now-c.at, c.monoPPB)}
}

// Authority is one look of the authority's daemon at its clocks.
func (c *Clock) Authority(now grant.Instant) authority.Reading {
	raw := c.raw
	if !c.asleep {
		raw += scaled(now-c.at, c.rawPPB)
	}
	return authority.Reading{Mono: c.Mono(now), Raw: raw}
}

// lag is how far BOOTTIME and MONOTONIC_RAW are from MONOTONIC: what the agent's
// guard looks at.
func (c *Clock) lag(now grant.Instant) (boot, raw time.Duration) {
	dt, mono := now-c.at, c.Mono(now)
	r := c.raw
	if !c.asleep {
		r += scaled(dt, c.rawPPB)
	}
	return (c.boot + scaled(dt, c.monoPPB)).Sub(mono), r.Sub(mono)
}

// When is the first real instant at which MONOTONIC reads at least mono, if the
// machine stays awake.
func (c *Clock) When(mono grant.Instant) grant.Instant {
	if mono == grant.Never {
		return grant.Never
	}
	left := mono - c.mono
	if left <= 0 {
		return c.at
	}
	guess := c.at + left/(billion+grant.Instant(c.monoPPB))*billion
	rest := left % (billion + grant.Instant(c.monoPPB))
	guess += rest * billion / (billion + grant.Instant(c.monoPPB))
	for guess > c.at && c.mono+scaled(guess-1-c.at, c.monoPPB) >= mono {
		guess--
	}
	for c.mono+scaled(guess-c.at, c.monoPPB) < mono {
		guess++
	}
	return guess
}
