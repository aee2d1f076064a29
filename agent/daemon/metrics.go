package daemon

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/proto/grant"
)

func (a *agentd) metrics() (http.Handler, error) {
	reg := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), newCollector(a)} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("metrics: %w", err)
		}
	}
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second}), nil
}

// metric is one value or family, read from a snapshot of all counters.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	read func(s *snapshot, emit func(v float64, labels ...string))
}

type snapshot struct {
	gate  gate.Stats
	a     *agentd
	ready bool
}

// collector turns the gate's counters into metrics at each scrape: the
// decisions themselves touch no metric. No label takes its value from a request.
type collector struct {
	a       *agentd
	latency *prometheus.Desc
	all     []metric
}

func newCollector(a *agentd) *collector {
	c := &collector{a: a, latency: prometheus.NewDesc("stipend_agent_decision_seconds",
		"Time to decide. Decisions that did not wait are a sample of one in 256.", []string{"path", "waited"}, nil)}
	add := func(kind prometheus.ValueType, name, help string, labels []string, read func(s *snapshot, emit func(float64, ...string))) {
		c.all = append(c.all, metric{prometheus.NewDesc("stipend_agent_"+name, help, labels, nil), kind, read})
	}
	count := func(name, help string, read func(*snapshot) uint64) {
		add(prometheus.CounterValue, name, help, nil, func(s *snapshot, emit func(float64, ...string)) { emit(float64(read(s))) })
	}
	gauge := func(name, help string, read func(*snapshot) float64) {
		add(prometheus.GaugeValue, name, help, nil, func(s *snapshot, emit func(float64, ...string)) { emit(read(s)) })
	}
	accounts := func(kind prometheus.ValueType, name, help string, read func(agent.AccountStats) float64) {
		add(kind, name, help, []string{"account"}, func(s *snapshot, emit func(float64, ...string)) {
			emit(read(s.gate.Wallets.AccountStats), "ordinary")
			emit(read(s.gate.Wallets.Reserve), "emergency")
		})
	}
	flag := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}

	add(prometheus.CounterValue, "decisions_total", "Decisions by outcome, reason (why not) and path.", []string{"outcome", "reason", "path"}, decisions)
	count("shadow_total", "Requests admitted only because the mode is shadow or off.", func(s *snapshot) uint64 { return s.gate.Shadow })
	accounts(prometheus.GaugeValue, "held_units", "Units held unspent.", func(t agent.AccountStats) float64 { return float64(t.Held) })
	accounts(prometheus.CounterValue, "granted_units_total", "Units in answers to open grant requests.", func(t agent.AccountStats) float64 { return float64(t.Granted) })
	accounts(prometheus.CounterValue, "spent_units_total", "Units spent from wallets.", func(t agent.AccountStats) float64 { return float64(t.Spent) })
	accounts(prometheus.CounterValue, "grant_requests_total", "Grant requests, retries not counted.", func(t agent.AccountStats) float64 { return float64(t.Requests) })
	accounts(prometheus.CounterValue, "grant_retries_total", "Grant requests sent again.", func(t agent.AccountStats) float64 { return float64(t.Retries) })
	add(prometheus.CounterValue, "dropped_units_total", "Units that became unusable, by cause.", []string{"account", "cause"}, func(s *snapshot, emit func(float64, ...string)) {
		for d := range agent.NumDrops {
			emit(float64(s.gate.Wallets.Dropped[d]), "ordinary", d.String())
			emit(float64(s.gate.Wallets.Reserve.Dropped[d]), "emergency", d.String())
		}
	})
	count("checks_total", "Checks begun at the authority.", func(s *snapshot) uint64 { return s.gate.Wallets.Checks })
	count("checks_refused_total", "Checks that the local ceiling kept from the authority.", func(s *snapshot) uint64 { return s.gate.Ceiling })
	count("answers_ignored_total", "Answers that were not for an open request.", func(s *snapshot) uint64 { return s.gate.Wallets.Ignored })
	count("answers_unreadable_total", "Answers that could not be read.", func(s *snapshot) uint64 { return s.gate.Problems })
	gauge("checks_in_flight", "Checks sent and not answered.", func(s *snapshot) float64 { return float64(s.gate.Checks) })
	gauge("tenants", "Tenants with state here.", func(s *snapshot) float64 { return float64(s.gate.Tenants) })
	gauge("tenants_hot", "Tenants that get grants.", func(s *snapshot) float64 { return float64(s.gate.Hot) })
	count("tenants_forgotten_total", "Idle tenants whose state was dropped.", func(s *snapshot) uint64 { return s.gate.Evicted })
	count("tenants_refused_total", "Requests of tenants for whom there was no room.", func(s *snapshot) uint64 { return s.gate.Refused })
	gauge("waiting", "Requests that wait for units or for a Check.", func(s *snapshot) float64 { return float64(s.gate.Waiting) })
	count("clock_moves_total", "Steps and sleeps that made the wallets distrusted.", func(s *snapshot) uint64 { return s.gate.Moves })
	gauge("ready", "1 when the agent can decide everything.", func(s *snapshot) float64 { return flag(s.ready) })
	gauge("draining", "1 when the agent drains.", func(s *snapshot) float64 { return flag(s.gate.Draining) })
	gauge("link_up", "1 while there is a stream to the authority.", func(s *snapshot) float64 { return flag(s.gate.Link.Up) })
	gauge("link_queued", "Requests that wait for sending.", func(s *snapshot) float64 { return float64(s.gate.Link.Queued) })
	count("link_dials_total", "Attempts to open a stream.", func(s *snapshot) uint64 { return s.gate.Link.Dials })
	count("link_lost_total", "Streams that ended.", func(s *snapshot) uint64 { return s.gate.Link.Lost })
	count("link_batches_total", "Batches sent.", func(s *snapshot) uint64 { return s.gate.Link.Batches })
	count("link_entries_total", "Grant requests and Checks sent.", func(s *snapshot) uint64 { return s.gate.Link.Entries })
	add(prometheus.CounterValue, "door_total", "What the doors did by themselves, by event.", []string{"event"}, func(s *snapshot, emit func(float64, ...string)) {
		d := s.a.door.Stats()
		emit(float64(d.Forwarded), "forwarded")
		emit(float64(d.Unverified), "unverified")
		emit(float64(d.Flooded), "unverified-flood")
		emit(float64(d.UnknownRoute), "unknown-route")
		emit(float64(d.BadCount), "bad-count")
		emit(float64(d.Late), "too-late")
		emit(float64(d.BackendFull), "backend-full")
		emit(float64(d.BackendFailed), "backend-failed")
	})
	if a.proxy != nil {
		gauge("backend_queued", "Requests that wait for a place at the backend.", func(s *snapshot) float64 { n, _ := a.proxy.Queued(); return float64(n) })
		gauge("backend_in_flight", "Requests at the backend.", func(s *snapshot) float64 { _, n := a.proxy.Queued(); return float64(n) })
	}
	if keys := a.ident.Keys(); keys != nil {
		gauge("keys", "API keys in use.", func(*snapshot) float64 { return float64(keys.State().Keys) })
		gauge("keys_stale", "1 when the key file cannot be used and the keys of before are.", func(*snapshot) float64 { return flag(keys.State().Stale) })
		gauge("keys_loaded_timestamp_seconds", "When the keys in use were read.", func(*snapshot) float64 { return float64(keys.State().Loaded.UnixMilli()) / 1e3 })
	}
	if a.writer != nil {
		count("records_lost_total", "Admissions that were not recorded.", func(*snapshot) uint64 { return a.writer.Lost() })
	}
	add(prometheus.GaugeValue, "build_info", "The version of the program.", []string{"version"}, func(s *snapshot, emit func(float64, ...string)) { emit(1, a.cfg.Version) })
	return c
}

// usual are shown from the start, so that their rates have a beginning.
var usual = []gate.Count{
	{Outcome: agent.Admitted, Path: agent.Local}, {Outcome: agent.Admitted, Path: agent.Central},
	{Outcome: agent.Denied, Reason: grant.Over, Path: agent.Local}, {Outcome: agent.Denied, Reason: grant.Over, Path: agent.Central},
	{Outcome: agent.Undecided, Reason: grant.Deadline}, {Outcome: agent.Undecided, Reason: grant.Unavailable},
	{Outcome: agent.Undecided, Reason: grant.Overloaded}, {Outcome: agent.Undecided, Reason: grant.ClockDistrust},
}

func decisions(s *snapshot, emit func(float64, ...string)) {
	show := func(c gate.Count) { emit(float64(c.N), c.Outcome.String(), c.Reason.String(), c.Path.String()) }
	seen := map[gate.Count]bool{}
	for _, c := range s.gate.Decisions {
		show(c)
		c.N = 0
		seen[c] = true
	}
	for _, c := range usual {
		if !seen[c] {
			show(c)
		}
	}
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.latency
	for _, m := range c.all {
		ch <- m.desc
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := &snapshot{gate: c.a.gate.Stats(), a: c.a, ready: c.a.gate.Ready() == nil}
	for _, m := range c.all {
		m.read(s, func(v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
		})
	}
	for _, l := range s.gate.Latencies {
		buckets, total := map[float64]uint64{}, uint64(0)
		for i, bound := range gate.LatencyBounds {
			total += l.Buckets[i]
			buckets[bound.Seconds()] = total
		}
		total += l.Buckets[len(gate.LatencyBounds)]
		ch <- prometheus.MustNewConstHistogram(c.latency, total, l.Sum.Seconds(), buckets, l.Path.String(), strconv.FormatBool(l.Waited))
	}
}
