package bounds

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

func good() *grant.Policy {
	p := granting(policy(10_000, time.Second, 1000), 100, 30, 10*time.Second)
	p.Classes = map[grant.RouteClass]grant.Class{"read": {Cost: 1}, "write": {Cost: 5}}
	return p
}

const rtt = 5 * time.Millisecond

// A policy at the edge of every condition gets the full promise and no
// warning; one step over any of them gets a sentence that says what it gets.
func TestWarnings(t *testing.T) {
	if w := Warnings(good(), rtt); len(w) != 0 || !PromiseOf(good(), rtt).Full() {
		t.Fatalf("a good policy: %v", w)
	}
	for _, tt := range []struct {
		name string
		edit func(*grant.Policy)
		want []string // parts of the warnings, one each
	}{
		{"slack", func(p *grant.Policy) { p.Grant.Owners = 32 }, []string{"32*100 = 3200 units is more than 3 %"}},
		{"slack promise", func(p *grant.Policy) { p.Grant.Owners = 32 }, []string{"the promise is 96.8 %"}},
		{"slack all", func(p *grant.Policy) { p.Grant.TTL = 200 * time.Millisecond }, []string{"no share of the rate is promised"}},
		{"quantum", func(p *grant.Policy) { p.Grant.Quantum = 99 }, []string{"grant.quantum: min(quantum, burst) = 99 units"}},
		{"quantum needed", func(p *grant.Policy) { p.Grant.Quantum = 99 }, []string{"takes at least 100 units"}},
		{"burst", func(p *grant.Policy) { p.Burst = 99 }, []string{"burst: min(quantum, burst) = 99 units"}},
		{"dear", func(p *grant.Policy) { p.Classes["dear"] = grant.Class{Cost: 101} }, []string{"classes.dear: its cost of 101 units"}},
		{"dear and central", func(p *grant.Policy) { p.Classes["dear"] = grant.Class{Cost: 101, Central: true} }, nil},
		{"no quantum", func(p *grant.Policy) { p.Grant.Quantum = 0 }, []string{"no grants"}},
		{"no owners", func(p *grant.Policy) { p.Grant.Owners = 0 }, []string{"no grants"}},
		{"no grants by choice", func(p *grant.Policy) { p.Grant = grant.GrantSettings{} }, nil},
		{"rate 0", func(p *grant.Policy) { p.Rate = grant.Rate{} }, []string{"rate 0: nothing refills"}},
		{"rate 0, no grants", func(p *grant.Policy) { p.Rate = grant.Rate{}; p.Grant.Quantum = 0 }, []string{"rate 0: nothing refills"}},
		{"burst 0", func(p *grant.Policy) { p.Burst = 0 }, []string{"burst 0"}},
		{"off", func(p *grant.Policy) { p.Mode = grant.Off }, []string{"mode off"}},
		{"shadow", func(p *grant.Policy) { p.Mode = grant.Shadow }, []string{"mode shadow"}},
		{"invalid", func(p *grant.Policy) { p.Rate.Per = 0 }, []string{"rate: 10000 units per 0s"}},
		{"emergency", func(p *grant.Policy) {
			p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 10, Per: time.Second}, Burst: 100, Grant: grant.GrantSettings{Quantum: 5, Owners: 10, TTL: time.Minute}}
			p.Classes["read"] = grant.Class{Cost: 1, Emergency: true}
		}, nil},
		{"emergency unused", func(p *grant.Policy) {
			p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 10, Per: time.Second}, Burst: 100, Grant: grant.GrantSettings{Quantum: 5, Owners: 10, TTL: time.Minute}}
		}, []string{"no class is marked emergency"}},
		{"emergency too slow", func(p *grant.Policy) {
			p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 10, Per: time.Hour}, Burst: 100, Grant: grant.GrantSettings{Quantum: 5, Owners: 10, TTL: time.Minute}}
			p.Classes["read"] = grant.Class{Cost: 1, Emergency: true}
		}, []string{"does not bring N*q = 50 units within the ttl of 1m0s"}},
		{"emergency rate 0", func(p *grant.Policy) {
			p.Emergency = &grant.Emergency{Burst: 100, Grant: grant.GrantSettings{Quantum: 5, Owners: 10, TTL: time.Minute}}
			p.Classes["read"] = grant.Class{Cost: 1, Emergency: true}
		}, []string{"never replaced; 50 units"}},
		{"emergency hands out nothing", func(p *grant.Policy) { p.Emergency = &grant.Emergency{Burst: 3} }, []string{"loss of the centre means 503"}},
	} {
		p := good()
		tt.edit(p)
		got := Warnings(p, rtt)
		if len(got) != len(tt.want) {
			t.Errorf("%s: %q", tt.name, got)
			continue
		}
		for i, part := range tt.want {
			if !strings.Contains(got[i], part) {
				t.Errorf("%s: %q lacks %q", tt.name, got[i], part)
			}
		}
		if tt.want != nil && !strings.HasPrefix(tt.name, "emergency") && p.Mode == grant.Enforce && len(p.Validate()) == 0 && PromiseOf(p, rtt).Full() {
			t.Errorf("%s: a warning and the full promise", tt.name)
		}
	}
	if w := Warnings(nil, rtt); len(w) != 1 {
		t.Errorf("no policy: %q", w)
	}
}

// The promise is rounded down and stays between nothing and everything.
func TestPromise(t *testing.T) {
	for _, tt := range []struct {
		q    grant.Units
		n    int
		ttl  time.Duration
		want int64
	}{
		{100, 30, 10 * time.Second, 970_000},
		{1, 1, 30 * time.Second, 999_996}, // 1/300,000 is lost: 999,996.67
		{100, 4096, time.Second, 0},
		{grant.MaxQuantum, grant.MaxOwners, grant.MinTTL, 0},
	} {
		p := granting(policy(10_000, time.Second, math.MaxInt64), tt.q, tt.n, tt.ttl)
		if got := PromiseOf(p, 0); got.PPM != tt.want || !got.Given {
			t.Errorf("q=%d N=%d ttl=%v: %+v, want %d", tt.q, tt.n, tt.ttl, got, tt.want)
		}
	}
	for ppm, want := range map[int64]string{970_000: "97 %", 1_000_000: "100 %", 999_999: "99.99 %", 0: "0 %", 968_000: "96.8 %"} {
		if got := percent(ppm); got != want {
			t.Errorf("%d: %q, want %q", ppm, got, want)
		}
	}
}

// The table names every number of a planner, in a fixed order.
func TestTable(t *testing.T) {
	rows, err := Table(granting(policy(10_000, time.Second, 1000), 6, 32, 10*time.Second), 0, 0,
		Question{Over: []time.Duration{time.Second, time.Minute}, RoundTrip: rtt, Extra: 200, Alive: 30, LostPerTTL: 2})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rows {
		if r.Formula == "" || r.Explanation == "" {
			t.Errorf("%+v", r)
		}
		got = append(got, r.Name+" = "+r.Value)
	}
	want := []string{
		"slack = 192 units", "max(1s) = 11192 units", "max(1m) = 601192 units", "coordination = 1666.67/s",
		"grant lasts = 19.2ms", "deploy cost = 192 units", "deploy time = 19.2ms", "utilisation = 99.8 %",
		"97 % promise = no", "largest quantum = 6 units", "owners needed = 32",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	for d, want := range map[time.Duration]string{
		0: "0s", time.Minute: "1m", time.Hour: "1h", 90 * time.Minute: "1h30m", time.Hour + time.Second: "1h0m1s", 10 * time.Second: "10s",
	} {
		if got := duration(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
	p := good()
	p.Emergency = &grant.Emergency{Burst: 5, Grant: grant.GrantSettings{Quantum: 1, Owners: 2, TTL: time.Minute}}
	if rows, err := Table(p, 0, 0, Question{}); err != nil || rows[0].Value != "3002 units" || rows[0].Formula != "N*q + N_e*q_e" {
		t.Errorf("with an emergency budget: %+v, %v", rows, err)
	}
	if _, err := Table(good(), 0, 0, Question{RoundTrip: -1}); err == nil {
		t.Error("a negative round trip was taken")
	}
}
