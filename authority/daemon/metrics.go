package daemon

import (
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

const namespace = "stipend_authority"

// metrics are all that this daemon exports. Label values come from enums of
// this repository only, never from tenants, owners or routes.
type metrics struct {
	all []prometheus.Collector

	commits     prometheus.Histogram
	commitBytes prometheus.Counter
	slow        prometheus.Counter
	refused     *prometheus.CounterVec
}

// refusals are the reasons for which a stream is refused.
var refusals = []string{
	grant.Invalid.String(), grant.Superseded.String(), grant.Discarded.String(), grant.Fenced.String(),
	grant.Conflict.String(), grant.Overloaded.String(), grant.Unavailable.String(),
}

func newMetrics(version string) *metrics {
	m := &metrics{
		commits: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "commit_duration_seconds",
			Help:                           "Time of a synced commit, of all partitions that had something to write.",
			Buckets:                        prometheus.ExponentialBuckets(0.0001, 2, 16), // 0.1 ms to 3.3 s
			NativeHistogramBucketFactor:    1.1,
			NativeHistogramMaxBucketNumber: 100,
		}),
		commitBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "commit_bytes_total", Help: "Bytes of records committed.",
		}),
		slow: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "slow_agents_total", Help: "Streams closed because their agent did not read its answers.",
		}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "link_refusals_total", Help: "Streams refused at their opening, by reason.",
		}, []string{"reason"}),
	}
	for _, r := range refusals {
		m.refused.WithLabelValues(r)
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: namespace, Name: "build_info", Help: "Always 1; what runs here.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()},
	})
	build.Set(1)
	m.all = []prometheus.Collector{m.commits, m.commitBytes, m.slow, m.refused, build,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})}
	return m
}

// linkRefused counts a stream refused at its opening.
func (m *metrics) linkRefused(err error) {
	why := reasonOf(err)
	if !slices.Contains(refusals, why) {
		why = grant.Unavailable.String()
	}
	m.refused.WithLabelValues(why).Inc()
}

func (m *metrics) committed(d time.Duration, bytes int, err error) {
	if err == nil {
		m.commits.Observe(d.Seconds())
		m.commitBytes.Add(float64(bytes))
	}
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

var (
	descGrants      = describe("grants_total", "Answers to grant requests, by result.", "result")
	descGrantWhy    = describe("grant_reasons_total", "Grant requests not granted, by reason.", "reason")
	descChecks      = describe("checks_total", "Answers to Checks, by verdict.", "verdict")
	descCheckWhy    = describe("check_reasons_total", "Checks not plainly allowed, by reason.", "reason")
	descReplays     = describe("replays_total", "Grants and Checks answered again from memory.")
	descUnits       = describe("units_total", "Units by what became of them: granted and checked were deducted, expired and discarded came out of granted, denied were asked for in vain.", "fate")
	descTenants     = describe("tenants", "Tenants with a policy.")
	descBuckets     = describe("buckets", "Buckets that are not full or not forgotten.")
	descOwners      = describe("owners", "Incarnations with an entry in some account.")
	descOutstanding = describe("outstanding_units", "Units that must be taken for unspent in wallets.")
	descParked      = describe("parked_grants", "Grant requests that wait for refill.")
	descDecisions   = describe("decisions", "Allowed Checks in the dedup window.")
	descInbox       = describe("inbox_calls", "Calls that wait for a step.")
	descIncarnation = describe("incarnations", "Known incarnations, by state.", "state")
	descLinks       = describe("links", "Open streams of agents.")
	descNoSpace     = describe("etcd_out_of_space", "1 when etcd's database is full: nobody can register.")
	descEtcdDown    = describe("etcd_unanswered", "1 when etcd did not answer the last question for its health.")
	descReady       = describe("ready", "1 when all partitions serve.")
)

// Describe implements prometheus.Collector.
func (d *daemon) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		descGrants, descGrantWhy, descChecks, descCheckWhy, descReplays, descUnits, descTenants, descBuckets, descOwners,
		descOutstanding, descParked, descDecisions, descInbox, descIncarnation, descLinks, descNoSpace, descEtcdDown, descReady,
	} {
		out <- desc
	}
}

// Collect implements prometheus.Collector: it sums the partitions' Stats.
func (d *daemon) Collect(out chan<- prometheus.Metric) {
	counter := func(desc *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, v, labels...)
	}
	gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
	}
	gauge(descReady, truth(!d.draining()))
	if !d.loaded.Load() {
		return
	}
	s := d.stats()
	for r := grant.Granted; int(r) < len(s.Grants); r++ {
		counter(descGrants, float64(s.Grants[r]), r.String())
	}
	for v := grant.Allow; int(v) < len(s.Checks); v++ {
		counter(descChecks, float64(s.Checks[v]), v.String())
	}
	for _, r := range grant.Reasons() {
		counter(descGrantWhy, float64(s.GrantsBy[r]), r.String())
		counter(descCheckWhy, float64(s.ChecksBy[r]), r.String())
	}
	counter(descReplays, float64(s.Replays))
	counter(descUnits, float64(s.Granted), "granted")
	counter(descUnits, float64(s.Checked), "checked")
	counter(descUnits, float64(s.Expired), "expired")
	counter(descUnits, float64(s.Discarded), "discarded")
	counter(descUnits, float64(s.Denied), "denied")
	gauge(descTenants, float64(s.Tenants))
	gauge(descBuckets, float64(s.Buckets))
	gauge(descOwners, float64(s.Owners))
	gauge(descOutstanding, float64(s.Outstanding))
	gauge(descParked, float64(s.Parked))
	gauge(descDecisions, float64(s.Decisions))
	gauge(descInbox, float64(s.Inbox))
	counts := d.registry.Counts()
	for m := authority.Live; m <= authority.Fenced; m++ {
		gauge(descIncarnation, float64(counts[m]), m.String())
	}
	gauge(descLinks, float64(len(d.router.open())))
	status := d.registry.Status()
	gauge(descNoSpace, truth(status.NoSpace))
	gauge(descEtcdDown, truth(status.Err != ""))
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// stats sums all partitions.
func (d *daemon) stats() authority.Stats {
	var sum authority.Stats
	for _, p := range d.partitions {
		s := p.stats()
		for i := range s.Grants {
			sum.Grants[i] += s.Grants[i]
		}
		for i := range s.Checks {
			sum.Checks[i] += s.Checks[i]
		}
		for i := range s.GrantsBy {
			sum.GrantsBy[i] += s.GrantsBy[i]
			sum.ChecksBy[i] += s.ChecksBy[i]
		}
		sum.Replays += s.Replays
		sum.Granted += s.Granted
		sum.Checked += s.Checked
		sum.Expired += s.Expired
		sum.Discarded += s.Discarded
		sum.Denied += s.Denied
		sum.Tenants += s.Tenants
		sum.Buckets += s.Buckets
		sum.Owners += s.Owners
		sum.Outstanding += s.Outstanding
		sum.Parked += s.Parked
		sum.Decisions += s.Decisions
		sum.Inbox += s.Inbox
	}
	return sum
}
