package bounds

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
	"pgregory.net/rapid"
)

const always = grant.Instant(math.MinInt64)

func policy(units grant.Units, per time.Duration, burst grant.Units) *grant.Policy {
	return &grant.Policy{Rate: grant.Rate{Units: units, Per: per}, Burst: burst}
}

func granting(p *grant.Policy, q grant.Units, n int, ttl time.Duration) *grant.Policy {
	p.Grant = grant.GrantSettings{Quantum: q, Owners: n, TTL: ttl}
	return p
}

// drawPolicy covers the rates that broke others as well as ordinary ones.
func drawPolicy(t *rapid.T, label string) *grant.Policy {
	if rapid.IntRange(0, 9).Draw(t, label+" deleted") == 0 {
		return nil
	}
	rates := []grant.Rate{
		{Units: 3, Per: 1000 * time.Millisecond}, {Units: 600, Per: time.Second}, {Units: 1, Per: 2 * time.Second},
		{Units: 10, Per: 30 * time.Second}, {Units: 1, Per: 7}, {Units: 5, Per: 3}, {}, {Units: 100, Per: 11 * time.Microsecond},
	}
	p := &grant.Policy{
		Rate:  rapid.SampledFrom(rates).Draw(t, label+" rate"),
		Burst: grant.Units(rapid.IntRange(0, 12).Draw(t, label+" burst")),
	}
	if rapid.Bool().Draw(t, label+" grants") {
		granting(p, grant.Units(rapid.IntRange(1, 5).Draw(t, label+" q")), rapid.IntRange(1, 4).Draw(t, label+" n"),
			time.Duration(rapid.IntRange(100, 3000).Draw(t, label+" ttl"))*time.Millisecond)
	}
	if rapid.IntRange(0, 4).Draw(t, label+" emergency") == 0 {
		p.Emergency = &grant.Emergency{
			Rate: rapid.SampledFrom(rates).Draw(t, label+" er"), Burst: 3,
			Grant: grant.GrantSettings{Quantum: 2, Owners: 2, TTL: time.Second},
		}
	}
	if rapid.IntRange(0, 5).Draw(t, label+" mode") == 0 {
		p.Mode = rapid.SampledFrom([]grant.Mode{grant.Shadow, grant.Off}).Draw(t, label+" which")
	}
	return p
}

func drawConfig(t *rapid.T) Config {
	ms := func(label string) time.Duration {
		return time.Duration(rapid.SampledFrom([]int{0, 0, 1, 300, 1000}).Draw(t, label)) * time.Millisecond
	}
	return Config{
		RhoPPB: rapid.SampledFrom([]int64{0, 1, 1_000_000, 33_333_333}).Draw(t, "rho"),
		D:      ms("d"), Skew: ms("skew"), Tolerance: ms("tolerance"), PolicyLag: ms("lag"),
		Scope: rapid.SampledFrom([]Scope{Whole, Whole, OrdinaryOnly, EmergencyOnly}).Draw(t, "scope"),
	}
}

// The checker finds exactly what the definition finds on every history: the
// least room and the largest excess over all intervals, and the time outside.
func TestCheckerAgreesWithTheDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := &oracle{cfg: drawConfig(t)}
		c, err := NewChecker(o.cfg)
		if err != nil {
			t.Fatal(err)
		}
		step := rapid.SampledFrom([]int64{1, 7, 1_000_000, 500_000_000}).Draw(t, "step")
		at := grant.Instant(rapid.SampledFrom([]int64{0, -5_000_000_000, 1_700_000_000_000_000_000}).Draw(t, "origin"))
		o.changes = append(o.changes, oracleChange{always, nil})
		changeAt := at
		if rapid.Bool().Draw(t, "policy from the start") {
			changeAt = always
		}
		for i := range rapid.IntRange(1, 7).Draw(t, "changes") {
			p := drawPolicy(t, fmt.Sprint("policy ", i))
			o.changes = append(o.changes, oracleChange{changeAt, p})
			if err := c.Change(changeAt, p); err != nil {
				t.Fatal(err)
			}
			changeAt = max(changeAt, at).Add(time.Duration(rapid.Int64Range(0, 12).Draw(t, "until") * step))
		}
		at = at.Add(time.Duration(rapid.Int64Range(-2, 2).Draw(t, "lead") * step))
		for range rapid.IntRange(0, 30).Draw(t, "admissions") {
			at = at.Add(time.Duration(rapid.Int64Range(0, 4).Draw(t, "gap") * step))
			a := event{at, grant.Units(rapid.IntRange(0, 6).Draw(t, "cost"))}
			o.events = append(o.events, a)
			if err := c.Admit(a.at, a.cost); err != nil {
				t.Fatal(err)
			}
			if err := c.Check(); err != nil {
				t.Fatal(err)
			}
		}
		if diff := o.compare(c); diff != "" {
			t.Fatal(diff)
		}
	})
}

// A change told only when its time comes gives the same verdict as one told
// in advance.
func TestCheckerNeedsNoForesight(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := drawConfig(t)
		ahead, _ := NewChecker(cfg)
		late, _ := NewChecker(cfg)
		type told struct {
			at grant.Instant
			p  *grant.Policy
		}
		var changes []told
		changeAt := grant.Instant(0)
		for i := range rapid.IntRange(1, 6).Draw(t, "changes") {
			changes = append(changes, told{changeAt, drawPolicy(t, fmt.Sprint(i))})
			changeAt += grant.Instant(rapid.Int64Range(0, 3e9).Draw(t, "until"))
		}
		for _, ch := range changes {
			if err := ahead.Change(ch.at, ch.p); err != nil {
				t.Fatal(err)
			}
		}
		var at grant.Instant
		for range rapid.IntRange(0, 30).Draw(t, "admissions") {
			at += grant.Instant(rapid.Int64Range(0, 1e9).Draw(t, "gap"))
			cost := grant.Units(rapid.IntRange(0, 6).Draw(t, "cost"))
			for len(changes) > 0 && changes[0].at.Add(-cfg.Skew) <= at {
				if err := late.Change(changes[0].at, changes[0].p); err != nil {
					t.Fatal(err)
				}
				changes = changes[1:]
			}
			for _, c := range []*Checker{ahead, late} {
				if err := c.Admit(at, cost); err != nil {
					t.Fatal(err)
				}
			}
		}
		a, _ := ahead.Verdict()
		l, _ := late.Verdict()
		if a.Held != l.Held || a.Worst.Admitted-a.Worst.Allowed != l.Worst.Admitted-l.Worst.Allowed || a.Excess != l.Excess || a.Outside != l.Outside {
			t.Fatalf("ahead %+v\nlate  %+v", a, l)
		}
	})
}

// A history at the bound is held; one unit more is broken by one unit. The
// rates are those that broke others (case 5).
func TestOneUnitOverIsReported(t *testing.T) {
	for _, tt := range []struct {
		name   string
		policy *grant.Policy
		cfg    Config
		after  time.Duration // from a drained bucket to the admission at the bound
		earned grant.Units   // in it
	}{
		{"3 per 1000 ms", policy(3, 1000*time.Millisecond, 4), Config{}, 1667 * time.Millisecond, 5},
		{"600 per 1 s in 1.666 ms", policy(600, time.Second, 10), Config{}, 1_666_667, 1},
		{"1 per 2 s", policy(1, 2*time.Second, 1), Config{}, 2 * time.Second, 1},
		{"1 per 10^9 s", policy(1, 1e9*time.Second, 1), Config{}, 1e9 * time.Second, 1},
		{"10 per 30 s", policy(10, 30*time.Second, 2), Config{}, 3 * time.Second, 1},
		{"with grants", granting(policy(10000, time.Second, 1000), 100, 32, 11*time.Second), Config{}, time.Second, 10000},
		{"with rho", policy(1000, time.Second, 20), Config{RhoPPB: 1_000_000}, 10 * time.Second, 10010},
		{"with d", policy(1000, time.Second, 1), Config{D: 5 * time.Millisecond}, time.Second, 1000},
		{"with skew", policy(1000, time.Second, 1), Config{Skew: time.Second}, time.Second, 1000},
		{"rate 0", policy(0, 0, 5), Config{}, time.Hour, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			flat := tt.policy.Burst + tt.policy.Grant.Slack()
			flat += grant.Units(float64(tt.policy.Rate.PerSecond()) * (tt.cfg.D + tt.cfg.Skew).Seconds())
			for extra := grant.Units(0); extra < 2; extra++ {
				c, _ := NewChecker(tt.cfg)
				if err := c.Change(always, tt.policy); err != nil {
					t.Fatal(err)
				}
				start := grant.Instant(77)
				admit := func(at grant.Instant, cost grant.Units) {
					if err := c.Admit(at, cost); err != nil {
						t.Fatal(err)
					}
				}
				admit(start, flat)
				end := start.Add(tt.after)
				for k := grant.Units(1); k <= tt.earned; k++ {
					after, _ := tt.policy.Rate.DurationCeil(k, 0)
					admit(min(end, start.Add(after)), 1) // as soon as it is earned
				}
				admit(end, extra)
				v, err := c.Verdict()
				if err != nil {
					t.Fatal(err)
				}
				if v.Held != (extra == 0) || v.Over() != extra {
					t.Errorf("with %d units more: %v", extra, v)
				}
				if extra > 0 && v.Worst.End != end {
					t.Errorf("worst interval: %v", v.Worst)
				}
				if tt.cfg == (Config{}) && extra == 1 && v.Excess != flat+1 {
					t.Errorf("excess %d, want B + N*q + 1 = %d", v.Excess, flat+1)
				}
			}
		})
	}
}

// One nanosecond too early for a unit is one unit over: nothing is rounded.
func TestOneNanosecondEarlyIsReported(t *testing.T) {
	for early := time.Duration(0); early < 2; early++ {
		c, _ := NewChecker(Config{})
		c.Change(always, policy(1, 1e9*time.Second, 1))
		c.Admit(0, 1)
		c.Admit(grant.Instant(1e9*time.Second-early), 1)
		if v, err := c.Verdict(); err != nil || v.Held != (early == 0) {
			t.Errorf("%v early: %v, %v", early, v, err)
		}
	}
}

// 2^63-1 units per ns over all of time is exact, and what does not fit is an
// error for good, never a wrap.
func TestHugeNumbers(t *testing.T) {
	huge := policy(grant.MaxUnits, 1, grant.MaxUnits)
	c, _ := NewChecker(Config{RhoPPB: MaxRhoPPB})
	if err := c.Change(always, huge); err != nil {
		t.Fatal(err)
	}
	for _, at := range []grant.Instant{always, 0, grant.Never} {
		if err := c.Admit(at, grant.MaxUnits/3); err != nil {
			t.Fatal(err)
		}
	}
	if v, err := c.Verdict(); err != nil || !v.Held || v.Accrued != grant.MaxUnits || v.UtilisationPPM != 0 {
		t.Errorf("%+v, %v", v, err)
	}
	if err := c.Admit(grant.Never, 10); !errors.Is(err, ErrOverflow) {
		t.Errorf("the sum of costs exceeds MaxUnits: %v", err)
	}
	if err := c.Admit(grant.Never, 0); !errors.Is(err, ErrOverflow) {
		t.Errorf("an overflow must be final: %v", err)
	}
	if _, err := c.Verdict(); !errors.Is(err, ErrOverflow) {
		t.Errorf("no verdict after an overflow: %v", err)
	}

	c, _ = NewChecker(Config{})
	var err error
	for _, per := range []time.Duration{math.MaxInt64, math.MaxInt64 - 1, math.MaxInt64 - 2, math.MaxInt64 - 4, math.MaxInt64 - 6} {
		if err = c.Change(0, policy(1, per, 1)); err != nil {
			break
		}
	}
	if !errors.Is(err, ErrOverflow) {
		t.Errorf("periods without a common denominator: %v", err)
	}
}

// Costs of zero count for nothing, negative ones and steps back are refused
// and leave the checker as it was (cases 1 and 10).
func TestRefusalsChangeNothing(t *testing.T) {
	c, _ := NewChecker(Config{})
	c.Change(always, policy(1, time.Second, 2))
	if err := c.Admit(100, 2); err != nil {
		t.Fatal(err)
	}
	before, _ := c.Verdict()
	if err := c.Admit(99, 1); !errors.Is(err, ErrOrder) {
		t.Errorf("a step back: %v", err)
	}
	if err := c.Change(50, nil); !errors.Is(err, ErrOrder) {
		t.Errorf("a change of the past: %v", err)
	}
	if err := c.Admit(200, -1); err == nil || errors.Is(err, ErrOrder) {
		t.Errorf("a negative cost: %v", err)
	}
	if err := c.Change(300, policy(-1, time.Second, 2)); err == nil {
		t.Error("an invalid policy was taken")
	}
	if after, _ := c.Verdict(); after != before {
		t.Errorf("changed: %+v, want %+v", after, before)
	}
	if err := c.Admit(100, 0); err != nil {
		t.Errorf("cost 0: %v", err)
	}
	if v, _ := c.Verdict(); !v.Held || v.Worst.Admitted != 2 {
		t.Errorf("cost 0 counted: %v", v)
	}
}

// Without a policy, and once it is deleted, nothing new is admitted; what
// grants hold may still be spent for one ttl.
func TestDeletedPolicy(t *testing.T) {
	run := func(at grant.Instant, cost grant.Units) Verdict {
		c, _ := NewChecker(Config{})
		c.Change(0, granting(policy(1, time.Second, 3), 2, 2, time.Second))
		c.Change(1e9, nil)
		if err := c.Admit(at, cost); err != nil {
			t.Fatal(err)
		}
		v, _ := c.Verdict()
		return v
	}
	for _, tt := range []struct {
		name string
		at   grant.Instant
		cost grant.Units
		held bool
	}{
		{"before any policy", -1, 1, false},
		{"in force", 5, 7, true},
		{"in force, one more", 5, 8, false},
		{"at the deletion", 1e9, 7, true},
		{"after it, out of wallets", 1e9 + 1, 4, true},
		{"after it, one more", 1e9 + 1, 5, false},
		{"one ttl later", 2e9, 4, true},
		{"later still", 2e9 + 1, 1, false},
	} {
		if v := run(tt.at, tt.cost); v.Held != tt.held {
			t.Errorf("%s: %v", tt.name, v)
		}
	}
}

// After a change another start may be the worst: here the new policy raises
// what the later start may count on by more than the earlier one's.
func TestChangeMovesTheWorstStart(t *testing.T) {
	for cost := grant.Units(10); cost <= 11; cost++ {
		c, _ := NewChecker(Config{})
		for i, q := range []grant.Units{10, 2, 8} {
			c.Change(grant.Instant(i)*1e9, granting(policy(0, 0, 5), q, 1, grant.MinTTL))
		}
		c.Admit(5e8, 5)
		c.Admit(15e8, 0)
		c.Admit(25e8, cost) // with the 5 at most 15: B of 5 and the first N*q of 10
		if v, err := c.Verdict(); err != nil || v.Held != (cost == 10) || v.Worst.Start != 5e8 {
			t.Errorf("cost %d: %v, %v", cost, v, err)
		}
	}
}

// A wallet may be spent for ttl*(1+2*rho)/(1-rho) up, plus the tolerance,
// after its policy was replaced, and not a nanosecond longer.
func TestLookBackForGrants(t *testing.T) {
	const life = 1_003_003_004 + 5 // ns, for rho = 0.001 and a tolerance of 5 ns
	for _, at := range []grant.Instant{life, life + 1} {
		c, _ := NewChecker(Config{RhoPPB: 1_000_000, Tolerance: 5})
		c.Change(always, granting(policy(0, 0, 0), 3, 1, time.Second))
		c.Change(0, nil)
		c.Admit(at, 3)
		if v, err := c.Verdict(); err != nil || v.Held != (at == life) {
			t.Errorf("at %d: %v, %v", at, v, err)
		}
	}
}

// Intervals do not span time under off or shadow, however short.
func TestOffRestarts(t *testing.T) {
	for _, mode := range []grant.Mode{grant.Off, grant.Shadow, grant.Enforce} {
		c, _ := NewChecker(Config{})
		p := policy(1, time.Hour, 5)
		pause := *p
		pause.Mode = mode
		c.Change(0, p)
		c.Change(1000, &pause)
		c.Change(1001, p)
		c.Admit(500, 5)
		if mode != grant.Enforce {
			c.Admit(1000, 1_000_000)
		}
		c.Admit(1500, 5)
		v, err := c.Verdict()
		if err != nil {
			t.Fatal(err)
		}
		if v.Held != (mode != grant.Enforce) {
			t.Errorf("mode %v: %v", mode, v)
		}
		if mode != grant.Enforce && (v.Outside != 1 || v.OutsideUnits != 1_000_000 || v.Admitted != 10) {
			t.Errorf("mode %v: %+v", mode, v)
		}
	}
}

// Utilisation is admitted over accrued, rho and time outside left out.
func TestUtilisation(t *testing.T) {
	c, _ := NewChecker(Config{RhoPPB: 1_000_000})
	p := policy(100, time.Second, 10)
	c.Change(always, p)
	off := *p
	off.Mode = grant.Off
	c.Change(5e9, &off)
	c.Change(10e9, p)
	c.Advance(0)
	for s := range grant.Instant(5) {
		c.Admit(s*1e9+1, 90)
	}
	c.Admit(11e9, 90)
	if err := c.Advance(15e9); err != nil {
		t.Fatal(err)
	}
	v, err := c.Verdict()
	if err != nil || v.Accrued != 1000 || v.UtilisationPPM != 540_000 {
		t.Errorf("%+v, %v", v, err)
	}
}

// An admission costs no allocation, however long the history.
func TestAdmitAllocatesNothing(t *testing.T) {
	c, _ := NewChecker(Config{Skew: time.Millisecond})
	c.Change(always, policy(100, time.Second, 10))
	var at grant.Instant
	if n := testing.AllocsPerRun(1000, func() { at += 1e6; c.Admit(at, 1) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzChecker(f *testing.F) {
	f.Add([]byte{3, 100, 5, 2, 2, 10, 0, 1, 4, 1, 3, 0, 9}, int64(1_000_000), int64(3), int64(7))
	f.Add([]byte{255, 1, 0, 0, 200, 9, 1, 1, 1}, int64(0), int64(math.MaxInt64), int64(1))
	f.Fuzz(func(t *testing.T, script []byte, rho, units, per int64) {
		o := &oracle{cfg: Config{RhoPPB: rho, D: 3, Skew: 2}}
		c, err := NewChecker(o.cfg)
		if err != nil {
			return
		}
		o.changes = []oracleChange{{always, nil}}
		at := grant.Instant(0)
		script = script[:min(len(script), 60)]
		next := func() byte {
			if len(script) == 0 {
				return 0
			}
			b := script[0]
			script = script[1:]
			return b
		}
		for len(script) > 0 {
			at += grant.Instant(next())
			if next()%4 == 0 {
				p := policy(grant.Units(units), time.Duration(per), grant.Units(next()))
				granting(p, grant.Units(next()), int(next()), grant.MinTTL)
				p.Mode = grant.Mode(next() % 4)
				at += 3 // one more than the skew: told in time
				if c.Change(at, p) == nil {
					o.changes = append(o.changes, oracleChange{at, p})
				}
				units, per = units/2+1, per/3+1
				continue
			}
			a := event{at, grant.Units(next())}
			if c.Admit(a.at, a.cost) == nil {
				o.events = append(o.events, a)
			}
		}
		if c.err != nil {
			return
		}
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
		if diff := o.compare(c); diff != "" {
			t.Fatal(diff)
		}
	})
}
