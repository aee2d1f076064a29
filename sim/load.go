package sim

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/proto/grant"
)

// Load is one stream of requests.
type Load struct {
	Tenant grant.TenantID
	Class  grant.RouteClass
	Count  grant.Units // operations of one request
	// Every is the time to the next request.
	Every Pace
	// At picks the gateway of a request, an index into World.Gateways.
	At Place
	// Budget of one request; zero: as long as the agent allows.
	Budget time.Duration
	Until  grant.Instant // zero: for ever
	// Done hears every decision; may be nil.
	Done func(g *Gateway, d agent.Decision)
}

// Pace is the time from one request to the next; it may look at the time.
type Pace func(now grant.Instant, rng *rand.Rand) time.Duration

// Place is the gateway of the next request.
type Place func(now grant.Instant, rng *rand.Rand) int

// Steady is perSecond requests, evenly.
func Steady(perSecond float64) Pace {
	d := time.Duration(float64(time.Second) / perSecond)
	return func(grant.Instant, *rand.Rand) time.Duration { return d }
}

// Poisson is perSecond requests on average, each independent of the others.
func Poisson(perSecond float64) Pace {
	return func(_ grant.Instant, rng *rand.Rand) time.Duration {
		return max(1, time.Duration(rng.ExpFloat64()/perSecond*float64(time.Second)))
	}
}

// OnOff is Steady in every other period, the first one included unless late.
func OnOff(perSecond float64, period time.Duration, late bool) Pace {
	d := time.Duration(float64(time.Second) / perSecond)
	return func(now grant.Instant, _ *rand.Rand) time.Duration {
		n := now.Sub(0) / period
		if (n%2 == 1) == late {
			return d
		}
		return (n+1)*period - now.Sub(0)
	}
}

// Bursts is n requests at once at every multiple of period: everybody who uses
// it with one period is in phase with everybody else.
func Bursts(n int, period time.Duration) Pace {
	i := 0
	return func(now grant.Instant, _ *rand.Rand) time.Duration {
		if i++; i%n != 0 {
			return 0
		}
		return period - now.Sub(0)%period
	}
}

// On is always the same gateway.
func On(i int) Place { return func(grant.Instant, *rand.Rand) int { return i } }

// Evenly is any of n gateways.
func Evenly(n int) Place { return func(_ grant.Instant, rng *rand.Rand) int { return rng.IntN(n) } }

// Hopping is one of n gateways at a time, the next one after each period.
func Hopping(n int, period time.Duration) Place {
	return func(now grant.Instant, _ *rand.Rand) int { return int(now.Sub(0)/period) % n }
}

// Skewed sends 90, 9 and 1 of 100 requests to three neighbours among n gateways,
// which move on after each period.
func Skewed(n int, period time.Duration) Place {
	return func(now grant.Instant, rng *rand.Rand) int {
		first := int(now.Sub(0) / period)
		switch k := rng.IntN(100); {
		case k < 90:
			return first % n
		case k < 99:
			return (first + 1) % n
		}
		return (first + 2) % n
	}
}

// Offer starts a load now.
func (w *World) Offer(l Load) {
	w.loads++
	rng := w.source(fmt.Sprintf("load %d", w.loads))
	if l.Budget == 0 {
		l.Budget = time.Hour
	}
	if l.Count == 0 {
		l.Count = 1
	}
	var next func()
	next = func() {
		if l.Until > 0 && w.now >= l.Until {
			return
		}
		g := w.gateways[l.At(w.now, rng)]
		var done func(agent.Decision)
		if l.Done != nil {
			done = func(d agent.Decision) { l.Done(g, d) }
		}
		g.Request(l.Tenant, l.Class, l.Count, l.Budget, done)
		w.After(l.Every(w.now, rng), next)
	}
	w.After(l.Every(w.now, rng), next)
}
