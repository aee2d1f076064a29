package gate

import (
	"sync/atomic"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/link"
	"github.com/stipend/stipend/proto/grant"
)

const (
	outcomes = int(agent.Rejected) + 1
	paths    = int(agent.Unrestricted) + 1
	shards   = 16
	// localSample: one in this many of the decisions that did not wait has its
	// time taken; a second reading of the clock would cost half of the decision.
	localSample = 256
)

// LatencyBounds are the upper bounds of the latency buckets; a last bucket
// without bound follows.
var LatencyBounds = [...]time.Duration{
	250, 500, 1e3, 2e3, 5e3, 10e3, 20e3, 50e3, 100e3, 200e3, 500e3,
	1e6, 2e6, 5e6, 10e6, 20e6, 50e6, 100e6, 250e6, 500e6, 1e9, 5e9,
}

// counters are sharded so that two cores seldom write the same cache line. The
// shard comes from the low digits of the reading at hand: Go offers no cheaper
// name for "this core", and a wrong guess costs only time.
type counters struct {
	decisions [shards]struct {
		n [outcomes * grant.NumReasons * paths]atomic.Uint64
		_ [64]byte
	}
	latency [paths][2]struct { // [1]: of those that waited
		n   [len(LatencyBounds) + 1]atomic.Uint64
		sum atomic.Int64
	}
	shadow atomic.Uint64
}

// scatter mixes a reading: its upper bits are as good as random.
func scatter(now grant.Instant) uint64 { return uint64(now) * 0x9E3779B97F4A7C15 }

func (c *counters) add(mix uint64, d *agent.Decision) {
	i := (int(d.Outcome)*grant.NumReasons+int(d.Reason))*paths + int(d.Path)
	if i < outcomes*grant.NumReasons*paths {
		c.decisions[mix>>60].n[i].Add(1)
	}
	if d.Shadow {
		c.shadow.Add(1)
	}
}

func (c *counters) took(p agent.Path, waited bool, d time.Duration) {
	i := 0
	for i < len(LatencyBounds) && d > LatencyBounds[i] {
		i++
	}
	l := &c.latency[p][0]
	if waited {
		l = &c.latency[p][1]
	}
	l.n[i].Add(1)
	l.sum.Add(int64(d))
}

// Count is how often one kind of decision was made.
type Count struct {
	Outcome agent.Outcome
	Reason  grant.Reason
	Path    agent.Path
	N       uint64
}

// Latency is the distribution of decision times on one path. Decisions that did
// not wait are sampled, one in 256.
type Latency struct {
	Path    agent.Path
	Waited  bool
	Buckets [len(LatencyBounds) + 1]uint64 // not cumulative
	Sum     time.Duration
}

// Stats is everything the gate counts. Sums are since its start.
type Stats struct {
	Tenants   int
	Waiting   int
	Hot       int
	Checks    int         // in flight
	Wallets   agent.Stats // over all tenants, forgotten ones too
	Link      link.State
	Moves     uint64 // clock moves that made the wallets distrusted
	Evicted   uint64 // tenants forgotten
	Refused   uint64 // requests of tenants beyond the table's bound
	Ceiling   uint64 // Checks refused by the ceiling
	Shadow    uint64 // admitted by mode shadow or off
	Problems  uint64 // entries of the authority that could not be read
	Draining  bool
	Decisions []Count // those that happened
	Latencies []Latency
}

// Stats collects the counters; it visits every tenant.
func (g *Gate) Stats() Stats {
	s := Stats{
		Checks: g.calls.len(), Link: g.link.State(), Moves: g.guard.moves.Load(),
		Evicted: g.evicted.Load(), Refused: g.refused.Load(), Ceiling: g.ceiling.Load(),
		Shadow: g.counters.shadow.Load(), Problems: g.problems.Load(), Draining: g.draining.Load(),
	}
	// The sums of forgotten tenants and the list are taken under one lock, so
	// that a tenant is in exactly one of them.
	g.table.mu.Lock()
	s.Wallets = g.retired
	slots := *g.table.slots.Load()
	entries := make([]*entry, 0, g.table.live)
	for i := range slots {
		if e := slots[i].Load(); e != nil && e != tombstone {
			entries = append(entries, e)
		}
	}
	g.table.mu.Unlock()
	s.Tenants = len(entries)
	for _, e := range entries {
		e.mu.Lock()
		t := e.tenant.Stats()
		e.mu.Unlock()
		s.Wallets = sum(s.Wallets, t)
		s.Waiting += t.Waiting
		if t.Hot {
			s.Hot++
		}
	}
	s.Wallets.Waiting = s.Waiting
	for o := range outcomes {
		for r := range grant.NumReasons {
			for p := range paths {
				var n uint64
				for i := range g.counters.decisions {
					n += g.counters.decisions[i].n[(o*grant.NumReasons+r)*paths+p].Load()
				}
				if n > 0 {
					s.Decisions = append(s.Decisions, Count{agent.Outcome(o), grant.Reason(r), agent.Path(p), n})
				}
			}
		}
	}
	for p := range paths {
		for w := range 2 {
			from := &g.counters.latency[p][w]
			l := Latency{Path: agent.Path(p), Waited: w == 1, Sum: time.Duration(from.sum.Load())}
			for i := range l.Buckets {
				l.Buckets[i] = from.n[i].Load()
			}
			s.Latencies = append(s.Latencies, l)
		}
	}
	return s
}

// sum adds the counters of b to a, and what it holds.
func sum(a, b agent.Stats) agent.Stats {
	for _, x := range []struct{ to, from *agent.AccountStats }{{&a.AccountStats, &b.AccountStats}, {&a.Reserve, &b.Reserve}} {
		x.to.Granted += x.from.Granted
		x.to.Spent += x.from.Spent
		x.to.Held += x.from.Held
		for i := range x.to.Dropped {
			x.to.Dropped[i] += x.from.Dropped[i]
		}
		x.to.Requests += x.from.Requests
		x.to.Retries += x.from.Retries
	}
	a.Checks += b.Checks
	a.Ignored += b.Ignored
	return a
}
