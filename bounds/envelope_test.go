package bounds

import (
	"errors"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
	"pgregory.net/rapid"
)

// The numbers that the planner's examples give.
func TestEnvelopeExamples(t *testing.T) {
	e := EnvelopeOf(granting(policy(10_000, time.Second, 1000), 100, 32, 11*time.Second), 0, 0)
	if m, err := e.Max(time.Second); err != nil || m != 10_000+1000+3200 {
		t.Errorf("Max(1s) = %d, %v", m, err)
	}
	if e.Slack() != 3200 {
		t.Errorf("slack %d", e.Slack())
	}
	if q, err := LargestQuantum(200, 32); err != nil || q != 6 {
		t.Errorf("largest quantum %d, %v", q, err)
	}
	if c, ok := e.CoordinationPerSecond(); !ok || c != 100 {
		t.Errorf("coordination %v", c)
	}
	if d, ok := e.GrantLasts(); !ok || d != 320*time.Millisecond {
		t.Errorf("a grant lasts %v", d)
	}
	if lost, refill, ok := e.DeployCost(); !ok || lost != 3200 || refill != 320*time.Millisecond {
		t.Errorf("deploy cost %v, %v", lost, refill)
	}
	e.Ordinary.Grant.Quantum = 6
	if c, _ := e.CoordinationPerSecond(); math.Abs(c-1666.67) > 0.01 {
		t.Errorf("coordination with q=6: %v", c)
	}
	if n, err := OwnersNeeded(30, 2); err != nil || n != 32 {
		t.Errorf("owners needed %d, %v", n, err)
	}
	e = EnvelopeOf(policy(1000, time.Second, 5), 1_000_000, 10*time.Millisecond)
	if m, err := e.Max(time.Second); err != nil || m != 5+1011 { // 1000*1.001*1.01 = 1011.01
		t.Errorf("with rho and d: %d, %v", m, err)
	}
	withEmergency := policy(10, time.Second, 5)
	withEmergency.Emergency = &grant.Emergency{Rate: grant.Rate{Units: 1, Per: 3 * time.Second}, Burst: 7, Grant: grant.GrantSettings{Quantum: 2, Owners: 3, TTL: time.Minute}}
	if m, err := EnvelopeOf(withEmergency, 0, 0).Max(time.Second); err != nil || m != 10+5+7+6 {
		t.Errorf("with an emergency budget: %d, %v", m, err)
	}
	if m, err := EnvelopeOf(nil, 0, 0).Max(time.Hour); err != nil || m != 0 {
		t.Errorf("without a policy: %d, %v", m, err)
	}
}

// Max is the exact floor for every rate, or ErrOverflow when it exceeds MaxUnits.
func TestMaxIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		big63 := rapid.OneOf(rapid.Int64Range(1, 1000), rapid.Int64Range(1, math.MaxInt64))
		draw := func(label string) int64 { return big63.Draw(t, label) }
		p := policy(grant.Units(draw("units")), time.Duration(draw("per")), grant.Units(draw("burst")))
		p.Emergency = &grant.Emergency{Rate: grant.Rate{Units: grant.Units(draw("eu")), Per: time.Duration(draw("ep"))}}
		rho, d, length := rapid.Int64Range(0, MaxRhoPPB).Draw(t, "rho"), draw("d"), draw("T")
		want := new(big.Rat)
		for _, r := range []grant.Rate{p.Rate, p.Emergency.Rate} {
			f := big.NewRat(int64(r.Units), int64(r.Per))
			want.Add(want, f.Mul(f, big.NewRat(1e9+rho, 1e9)))
		}
		span := new(big.Int).Add(big.NewInt(length), big.NewInt(d))
		want.Mul(want, new(big.Rat).SetInt(span)).Add(want, big.NewRat(int64(p.Burst), 1))
		floor := new(big.Int).Div(want.Num(), want.Denom())
		got, err := EnvelopeOf(p, rho, time.Duration(d)).Max(time.Duration(length))
		if !floor.IsInt64() {
			if !errors.Is(err, ErrOverflow) {
				t.Fatalf("want an overflow for %v, got %v, %v", floor, got, err)
			}
		} else if err != nil || int64(got) != floor.Int64() {
			t.Fatalf("got %v, %v, want %v", got, err, floor)
		}
	})
}

// A checker breaks exactly where the envelope ends.
func TestEnvelopeAndCheckerAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t, "policy")
		if p != nil {
			p.Mode = grant.Enforce
		}
		rho, d := rapid.Int64Range(0, 1e7).Draw(t, "rho"), time.Duration(rapid.Int64Range(0, 1e9).Draw(t, "d"))
		length := time.Duration(rapid.Int64Range(0, 5e9).Draw(t, "T"))
		most, err := EnvelopeOf(p, rho, d).Max(length)
		if err != nil {
			t.Fatal(err)
		}
		atOnce, _ := EnvelopeOf(p, rho, d).Max(0)
		for extra := grant.Units(0); extra < 2; extra++ {
			c, _ := NewChecker(Config{RhoPPB: rho, D: d})
			c.Change(always, p)
			// As much as may come at once at both ends breaks nothing by itself.
			first := min(most, atOnce)
			c.Admit(0, first)
			rest := most - first
			if rest > atOnce {
				t.Skip("the middle would have to be spread")
			}
			c.Admit(grant.Instant(length), rest+extra)
			if v, err := c.Verdict(); err != nil || v.Held != (extra == 0) {
				t.Fatalf("%d more than Max(%v) = %d: %v, %v", extra, length, most, v, err)
			}
		}
	})
}

func TestEnvelopeRefuses(t *testing.T) {
	good := EnvelopeOf(policy(1, time.Second, 1), 0, 0)
	for _, tt := range []struct {
		field string
		err   func() error
	}{
		{"T", func() error { _, err := good.Max(-1); return err }},
		{"rho_ppb", func() error { e := good; e.RhoPPB = -1; return e.Validate() }},
		{"rho_ppb", func() error { e := good; e.RhoPPB = MaxRhoPPB + 1; return e.Validate() }},
		{"d: ", func() error { e := good; e.D = -1; return e.Validate() }},
		{"rate", func() error { e := good; e.Ordinary.Rate.Per = 0; return e.Validate() }},
		{"emergency.burst", func() error { e := good; e.Emergency.Burst = -1; return e.Validate() }},
		{"extra burst", func() error { _, err := LargestQuantum(-1, 1); return err }},
		{"owners", func() error { _, err := LargestQuantum(1, 0); return err }},
		{"owners", func() error { _, err := OwnersNeeded(grant.MaxOwners, 1); return err }},
		{"owners alive", func() error { _, err := OwnersNeeded(-1, 1); return err }},
		{"skew", func() error { return Config{Skew: -1}.Validate() }},
		{"policy_lag", func() error { return Config{PolicyLag: math.MaxInt64}.Validate() }},
		{"scope", func() error { return Config{Scope: 3}.Validate() }},
	} {
		if err := tt.err(); err == nil || !strings.Contains(err.Error(), tt.field) || !strings.Contains(err.Error(), "allowed") {
			t.Errorf("%s: %v", tt.field, err)
		}
	}
}

func FuzzEnvelope(f *testing.F) {
	f.Add(int64(10000), int64(time.Second), int64(1000), int64(100), 32, int64(time.Second), int64(time.Minute))
	f.Add(int64(math.MaxInt64), int64(1), int64(math.MaxInt64), int64(grant.MaxQuantum), grant.MaxOwners, int64(grant.MaxTTL), int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, units, per, burst, q int64, n int, ttl, length int64) {
		p := granting(policy(grant.Units(units), time.Duration(per), grant.Units(burst)), grant.Units(q), n, time.Duration(ttl))
		e := EnvelopeOf(p, 1_000_000, 0)
		small, err := e.Max(time.Duration(length) / 2)
		large, err2 := e.Max(time.Duration(length))
		if err == nil && err2 == nil && (small > large || small < 0) {
			t.Fatalf("Max falls from %d to %d", small, large)
		}
		if e.Validate() == nil {
			if _, err := Table(p, 0, 0, Question{RoundTrip: time.Duration(max(length, 0))}); err != nil {
				t.Fatal(err)
			}
		}
		Warnings(p, time.Duration(length))
	})
}
