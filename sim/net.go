package sim

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// NetConfig says how the network behaves. A stream keeps the order of its
// messages and loses them only by breaking. The three PPM are worse than any
// stream: they stand for whatever a proxy, a retry or a bug may do.
type NetConfig struct {
	// Latency one way, and what is added at random, evenly.
	Latency, Jitter time.Duration
	// LossPPM of messages vanish though the stream lives on.
	LossPPM int
	// DupPPM of messages arrive twice, the second time late.
	DupPPM int
	// LatePPM of messages arrive out of order, up to Late late, and even after
	// their stream broke.
	LatePPM int
	Late    time.Duration
	// BreakEvery is the mean time between breaks of one stream. Zero: never.
	BreakEvery time.Duration
	// Silence is how long an agent with unanswered requests hears nothing
	// before it gives the stream up. Zero: 3 s.
	Silence time.Duration
}

func (c NetConfig) validate() error {
	for _, f := range [...]struct {
		field string
		given time.Duration
	}{{"latency", c.Latency}, {"jitter", c.Jitter}, {"late", c.Late}, {"break_every", c.BreakEvery}, {"silence", c.Silence}} {
		if f.given < 0 || f.given > time.Hour {
			return fmt.Errorf("net.%s: %v; allowed: 0 to 1h", f.field, f.given)
		}
	}
	for _, f := range [...]struct {
		field string
		given int
	}{{"loss_ppm", c.LossPPM}, {"dup_ppm", c.DupPPM}, {"late_ppm", c.LatePPM}} {
		if f.given < 0 || f.given > 900_000 {
			return fmt.Errorf("net.%s: %d; allowed: 0 to 900000", f.field, f.given)
		}
	}
	return nil
}

const defaultSilence = 3 * time.Second

// Traffic counts messages of all streams.
type Traffic struct{ Sent, Lost, Duplicated, Late uint64 }

// stream is one connection of a gateway's process to the center's process.
type stream struct {
	w       *World
	rng     *rand.Rand
	gateway *Gateway
	process uint64 // of the gateway
	inc     grant.Incarnation
	owner   grant.Owner
	center  uint64 // the center's process
	open    bool   // welcomed
	broken  bool
	last    [2]grant.Instant // arrival of the newest message that keeps order, by direction
	unheard int              // requests without an answer
	heard   grant.Instant    // agent's MONOTONIC
}

const (
	toCenter = iota
	toGateway
)

// sure carries a message of the session itself: what is worse than a stream
// happens to entries of batches only.
func (s *stream) sure(direction int, f func()) {
	if s.broken {
		return
	}
	at := max(s.w.now.Add(s.latency()), s.last[direction])
	s.last[direction] = at
	s.arrive(direction, at.Sub(s.w.now), f, false)
}

// send carries one entry. f runs on arrival, if the receiving process still
// lives; it must not keep anything that the sender changes later.
func (s *stream) send(direction int, f func()) {
	c := &s.w.cfg.Net
	chance := func(ppm int) bool { return ppm > 0 && s.rng.IntN(1_000_000) < ppm }
	if s.broken {
		return
	}
	s.w.Traffic.Sent++
	if chance(c.LossPPM) {
		s.w.Traffic.Lost++
		return
	}
	if chance(c.DupPPM) {
		s.w.Traffic.Duplicated++
		s.arrive(direction, s.latency()+s.late(), f, true)
	}
	if chance(c.LatePPM) {
		s.w.Traffic.Late++
		s.arrive(direction, s.latency()+s.late(), f, true)
		return
	}
	s.sure(direction, f)
}

func (s *stream) latency() time.Duration {
	d := s.w.cfg.Net.Latency
	if j := s.w.cfg.Net.Jitter; j > 0 {
		d += time.Duration(s.rng.Int64N(int64(j)))
	}
	return d
}

func (s *stream) late() time.Duration {
	if l := s.w.cfg.Net.Late; l > 0 {
		return time.Duration(s.rng.Int64N(int64(l)))
	}
	return 0
}

func (s *stream) arrive(direction int, after time.Duration, f func(), stray bool) {
	s.w.After(after, func() {
		switch {
		case s.broken && !stray:
		case direction == toCenter:
			s.w.Center.do(s.center, f)
		default:
			s.gateway.do(s.process, f)
		}
	})
}

// cut breaks the stream. Both ends hear of it a little later.
func (s *stream) cut() {
	if s.broken {
		return
	}
	s.broken = true
	s.w.After(s.latency(), func() { s.w.Center.do(s.center, func() { s.w.Center.detach(s) }) })
	s.w.After(s.latency(), func() { s.gateway.do(s.process, func() { s.gateway.down(s) }) })
}

// wear breaks the stream by chance, some day.
func (s *stream) wear() {
	if every := s.w.cfg.Net.BreakEvery; every > 0 {
		s.w.After(time.Duration(s.rng.ExpFloat64()*float64(every)), s.cut)
	}
}
