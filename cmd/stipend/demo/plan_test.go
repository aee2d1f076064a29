package demo

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

// TestSyntheticLoad proves that the load is what it is said to be: open, in
// order, twice the limit, and 90/9/1 over the gateways with the favourite
// moving over all of them.
func TestSyntheticLoad(t *testing.T) {
	p := synthetic(20 * time.Second)
	var units grant.Units
	var by [gateways]int
	n := 0
	last := time.Duration(0)
	for a := range p.streams[0] {
		if a.at < last || a.at >= p.length || a.tenant != 0 {
			t.Fatalf("arrival %+v after %v", a, last)
		}
		last = a.at
		units += a.cost
		n++
		by[(p.gateway(a.at, a.draw)-p.favourite(a.at)+gateways)%gateways]++
	}
	if offered := float64(units) / p.length.Seconds(); offered < 0.95*hotOffered || offered > 1.05*hotOffered {
		t.Errorf("%.0f units/s offered, want %d", offered, hotOffered)
	}
	for i, want := range [gateways]float64{0.90, 0.09, 0.01} {
		if share := float64(by[i]) / float64(n); share < want-0.01 || share > want+0.01 {
			t.Errorf("the favourite's neighbour %d gets %.3f of the requests, want %.2f", i, share, want)
		}
	}
	seen := map[int]bool{}
	for at := time.Duration(0); at < p.length; at += p.shift {
		seen[p.favourite(at)] = true
	}
	if len(seen) != gateways {
		t.Errorf("favourites are %v", seen)
	}
}

// TestBackendNotesWhatItMust proves that the backend takes nobody's word: a
// key of no tenant, an unknown route and a count that is none are no records but
// marks against the gateways.
func TestBackendNotesWhatItMust(t *testing.T) {
	p := &plan{
		tenants: []tenant{{id: "acme", policy: &grant.Policy{Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 3}, "tokens": {Cost: 2}}}, keys: []string{"k"}}},
		routes:  []route{{pattern: "GET /", class: "read"}, {pattern: "POST /v1/complete", class: "tokens", counted: true}},
	}
	b, err := startBackend(p, "127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.listen.Close()
	ask := func(method, path, key, count, sent string) {
		r := httptest.NewRequest(method, path, nil)
		r.Header.Set(keyHeader, key)
		r.Header.Set(countHeader, count)
		r.Header.Set(sentHeader, sent)
		b.ServeHTTP(httptest.NewRecorder(), r)
	}
	ask("GET", "/items", "k", "", "5")
	ask("POST", "/v1/complete", "k", "7", "6")
	if got, strange, _ := b.taken(); strange != 0 || len(got) != 2 || got[0].cost != 3 || got[1].cost != 14 || got[1].sent != 6 {
		t.Fatalf("%+v, %d strange", got, strange)
	}
	ask("GET", "/items", "other", "", "5")
	ask("PUT", "/items", "k", "", "5")
	ask("POST", "/v1/complete", "k", "-1", "5")
	ask("GET", "/items", "k", "", "soon")
	got, strange, first := b.taken()
	if len(got) != 2 || strange != 4 || !strings.Contains(first, "stands for nobody") {
		t.Errorf("%d records, %d strange, first %q", len(got), strange, first)
	}
}

// TestTraces proves that requests of a trace keep their method and path
// through sorting, that costs are the sums of columns, and that what cannot be
// replayed is refused with its place.
func TestTraces(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	line := func(client, clock, request string) string {
		return client + ` - - [17/May/2015:10:` + clock + ` +0000] "` + request + ` HTTP/1.1" 200 5 "-" "-"` + "\n"
	}
	log := write("access.log", line("a", "05:43", "GET /images/x.png")+line("b", "05:03", "POST /form")+line("a", "05:10", "GET /?q=1")+
		line("a", "06:00", "-")+line("b", "06:00", "PROPFIND /dav"))
	p, err := replay(Trace{File: log, Kind: trace.Combined, Window: time.Minute, Speed: 10}, 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	var costs []grant.Units
	for a := range p.streams[0] {
		got = append(got, string(p.tenants[a.tenant].id)+" "+a.method+" "+a.path+" "+a.at.String())
		costs = append(costs, a.cost)
	}
	want := "b POST /form 0s, a GET / 700ms, a GET /images/x.png 4s, b PROPFIND /dav 5.7s"
	if strings.Join(got, ", ") != want {
		t.Errorf("replayed %s\nwant     %s", strings.Join(got, ", "), want)
	}
	if len(costs) == 4 && (costs[0] != 5 || costs[1] != 2 || costs[2] != 1 || costs[3] != 0) {
		t.Errorf("costs %v", costs)
	}

	csv := Trace{Kind: trace.CSV, TimeColumn: "TIMESTAMP", CostColumns: []string{"in", "out"}, Window: time.Minute}
	csv.File = write("calls.csv", "TIMESTAMP,in,out\n2026-01-01 00:00:00,10,5\n2026-01-01 00:00:10,20,5\n")
	if p, err = replay(csv, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	for a := range p.streams[0] {
		if a.at == 0 && (a.cost != 15 || a.count != 15) || a.at > 0 && a.cost != 25 {
			t.Errorf("%+v", a)
		}
	}
	if faults := p.tenants[0].policy.Validate(); len(faults) > 0 || p.tenants[0].policy.Grant.Quantum < 25 {
		t.Errorf("policy %+v: %v", p.tenants[0].policy, faults)
	}

	csv.File = write("bad.csv", "TIMESTAMP,in,out\n2026-01-01 00:00:00,10,x\n")
	var bad *trace.Error
	if _, err = replay(csv, 5*time.Second); !errors.As(err, &bad) || bad.Line != 2 {
		t.Errorf("a cost that is no number: %v", err)
	}
	csv.File = write("none.csv", "TIMESTAMP,in,out\n")
	if _, err = replay(csv, 5*time.Second); err == nil || !strings.Contains(err.Error(), "holds no request") {
		t.Errorf("no request: %v", err)
	}
	csv.File, csv.Speed = write("calls.csv", "TIMESTAMP,in,out\n2020-01-01 00:00:00,10,5\n2026-01-01 00:00:10,20,5\n"), 1
	if _, err = replay(csv, 5*time.Second); err == nil || !strings.Contains(err.Error(), "--speed 1") {
		t.Errorf("six years at speed 1: %v", err)
	}
}

// TestSamples proves that metrics pages are read, quoted labels and all.
func TestSamples(t *testing.T) {
	page := "# HELP a b\n# TYPE a counter\na 1\nb{x=\"1\",y=\"q\\\"},\"} 2.5 1700000000\nb{x=\"2\",y=\"\"} 3\n" +
		"h_bucket{path=\"local\",le=\"0.001\"} 90\nh_bucket{path=\"local\",le=\"0.01\"} 99\nh_bucket{path=\"local\",le=\"+Inf\"} 100\n"
	list, err := parseSamples(strings.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	if got := list.sum("b"); got != 5.5 {
		t.Errorf("sum of b is %g", got)
	}
	if got := list.sum("b", "y", `q"},`); got != 2.5 {
		t.Errorf("sum of one b is %g", got)
	}
	h := list.histogram("h", "path", "local")
	p50, ok := h.quantile(0.5)
	p99, _ := h.quantile(0.99)
	if !ok || p50 != time.Millisecond || p99 != 10*time.Millisecond {
		t.Errorf("quantiles %v, %v, %v", p50, p99, ok)
	}
	if _, ok := list.histogram("h", "path", "central").quantile(0.5); ok {
		t.Error("a histogram that is not there has a median")
	}
	for _, bad := range []string{"a", "a{", "a{x} 1", "a{x=1} 1", `a{x="1"} y`} {
		if _, err := parseSamples(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is read", bad)
		}
	}
}

// FuzzSamples looks for a page that makes the reader panic.
func FuzzSamples(f *testing.F) {
	f.Add("a{x=\"1\"} 2\n")
	f.Add("a_bucket{le=\"+Inf\"} NaN\n#\n")
	f.Fuzz(func(t *testing.T, page string) {
		list, err := parseSamples(strings.NewReader(page))
		if err == nil {
			list.histogram("a").quantile(0.99)
		}
	})
}

// TestLoadIsHonest proves that answers are counted for what they are, that a
// gateway that does not answer gets nothing for a while, and that every request
// is accounted for.
func TestLoadIsHonest(t *testing.T) {
	var turn int
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		codes := []int{200, 429, 503, 401, 404, 418}
		w.WriteHeader(codes[turn%len(codes)])
		turn++
	}))
	defer gateway.Close()
	p := synthetic(MinLength)
	var list []arrival
	for i := range 60 {
		list = append(list, arrival{at: time.Duration(i) * time.Millisecond, tenant: 0, method: "GET", path: "/", cost: 1, draw: 0})
	}
	p.streams = p.streams[:0]
	p.streams = append(p.streams, func(yield func(arrival) bool) {
		for _, a := range list {
			if !yield(a) {
				return
			}
		}
	})
	up := strings.TrimPrefix(gateway.URL, "http://")
	gateway.Config.SetKeepAlivesEnabled(true)
	l := newLoad(p, []string{"127.0.0.1:1", up, up}, func() grant.Instant { return 7 })
	l.slots = make(chan struct{}, 1) // one at a time: the others are counted as not sent
	l.run(context.Background(), time.Now())
	o := &l.roles[hot]
	answered := o.ok.Load() + o.limited.Load() + o.undecided.Load() + o.unverified.Load() + o.unrouted.Load() + o.other.Load()
	if o.broken.Load() != 1 {
		t.Errorf("%d requests went to a gateway that refuses connections, want the first only", o.broken.Load())
	}
	if o.sent.Load() != answered+o.broken.Load() || o.sent.Load()+o.skipped.Load() != int64(len(list)) || answered == 0 {
		t.Errorf("%d sent, %d answered, %d broken, %d not sent of %d", o.sent.Load(), answered, o.broken.Load(), o.skipped.Load(), len(list))
	}
	if answered >= 6 && (o.other.Load() == 0 || l.strange.Load() == nil || l.saturated.Load() == 0) {
		t.Errorf("an answer that nothing explains was not noted, or the refusal was not")
	}
}
