package wire

import (
	"math"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

func drawTenant(t *rapid.T) grant.TenantID {
	return grant.TenantID(rapid.StringMatching(`[a-zé:/ .0-9]{1,40}`).Draw(t, "tenant"))
}

func drawClass(t *rapid.T) grant.RouteClass {
	return grant.RouteClass(rapid.StringMatching(`[A-Za-z0-9_.-]{1,64}`).Draw(t, "class"))
}

func drawIncarnation(t *rapid.T) (i grant.Incarnation) {
	copy(i[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "incarnation"))
	i[0] |= 1
	return i
}

func drawUnits(t *rapid.T, label string, low, high grant.Units) grant.Units {
	return grant.Units(rapid.Int64Range(int64(low), int64(high)).Draw(t, label))
}

func drawDuration(t *rapid.T, label string) time.Duration {
	return time.Duration(rapid.Int64Range(0, math.MaxInt64).Draw(t, label))
}

func drawSettings(t *rapid.T) grant.GrantSettings {
	if rapid.Bool().Draw(t, "no grants") {
		return grant.GrantSettings{}
	}
	return grant.GrantSettings{
		Quantum: drawUnits(t, "quantum", 1, grant.MaxQuantum),
		Owners:  rapid.IntRange(0, grant.MaxOwners).Draw(t, "owners"),
		TTL:     time.Duration(rapid.Int64Range(int64(grant.MinTTL), int64(grant.MaxTTL)).Draw(t, "ttl")),
	}
}

func drawRate(t *rapid.T) grant.Rate {
	return grant.Rate{
		Units: drawUnits(t, "rate", 0, grant.MaxUnits),
		Per:   time.Duration(rapid.Int64Range(1, math.MaxInt64).Draw(t, "per")),
	}
}

// drawPolicy draws a policy that Validate accepts.
func drawPolicy(t *rapid.T) *grant.Policy {
	p := &grant.Policy{
		Plan:  rapid.StringMatching(`[a-z]{0,10}`).Draw(t, "plan"),
		Rate:  drawRate(t),
		Burst: drawUnits(t, "burst", 0, grant.MaxUnits),
		Grant: drawSettings(t),
		Mode:  grant.Mode(rapid.IntRange(0, int(grant.Off)).Draw(t, "mode")),
	}
	if rapid.Bool().Draw(t, "has emergency") {
		p.Emergency = &grant.Emergency{Rate: drawRate(t), Burst: drawUnits(t, "burst", 0, 1000), Grant: drawSettings(t)}
	}
	for range rapid.IntRange(0, 5).Draw(t, "classes") {
		c := grant.Class{Central: rapid.Bool().Draw(t, "central"), Cost: drawUnits(t, "cost", 0, grant.MaxUnits)}
		if p.Burst > 0 {
			c.Cost = min(c.Cost, p.Burst)
		}
		if e := p.Emergency; e != nil && rapid.Bool().Draw(t, "emergency class") {
			c.Emergency, c.Cost = true, min(c.Cost, e.Grant.Quantum)
		}
		if p.Classes == nil {
			p.Classes = map[grant.RouteClass]grant.Class{}
		}
		p.Classes[drawClass(t)] = c
	}
	if found := p.Validate(); len(found) > 0 {
		t.Fatalf("the generator made a faulty policy: %v", found)
	}
	return p
}

func drawCopy(t *rapid.T) grant.PolicyCopy {
	switch rapid.IntRange(0, 2).Draw(t, "copy") {
	case 0:
		return grant.PolicyCopy{}
	case 1:
		return grant.PolicyCopy{Version: rapid.Uint64Min(1).Draw(t, "version")}
	}
	return grant.PolicyCopy{Version: rapid.Uint64Min(1).Draw(t, "version"), Policy: drawPolicy(t)}
}

// same proves that the value survives To, the bytes of the wire, and From.
func same[P any, M proto.Message](t *rapid.T, p P, m M, from func(M) (P, error)) {
	t.Helper()
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatalf("marshal: %v", err)
	}
	received := m.ProtoReflect().New().Interface().(M)
	if err := proto.Unmarshal(raw, received); err != nil {
		t.Fatalf("unmarshal: %v", err)
	}
	back, err := from(received)
	if err != nil {
		t.Fatalf("%+v is refused: %v", p, err)
	}
	if !reflect.DeepEqual(back, p) {
		t.Fatalf("went out as %+v\ncame back as %+v", p, back)
	}
}

func drawGrantRequest(t *rapid.T) grant.GrantRequest {
	r := grant.GrantRequest{
		Tenant:       drawTenant(t),
		Incarnation:  drawIncarnation(t),
		Emergency:    rapid.Bool().Draw(t, "emergency"),
		ID:           grant.GrantID(rapid.Uint64Min(1).Draw(t, "id")),
		Want:         drawUnits(t, "want", 1, grant.MaxUnits),
		Held:         drawUnits(t, "held", 0, grant.MaxQuantum),
		Age:          drawDuration(t, "age"),
		KnownVersion: rapid.Uint64().Draw(t, "known"),
	}
	r.Min = drawUnits(t, "min", 1, r.Want)
	r.Sum = r.Fingerprint()
	return r
}

func TestGrantRequestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawGrantRequest(t)
		same(t, r, ToGrantRequest(&r), with(r.Incarnation, FromGrantRequest))
	})
}

// with fixes the incarnation, which comes from the link.
func with[P any, M any](inc grant.Incarnation, from func(M, grant.Incarnation) (P, error)) func(M) (P, error) {
	return func(m M) (P, error) { return from(m, inc) }
}

func TestGrantAnswerRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := grant.GrantAnswer{
			Tenant:      drawTenant(t),
			Incarnation: drawIncarnation(t),
			Emergency:   rapid.Bool().Draw(t, "emergency"),
			ID:          grant.GrantID(rapid.Uint64Min(1).Draw(t, "id")),
			Result:      grant.GrantResult(rapid.IntRange(int(grant.Granted), int(grant.Busy)).Draw(t, "result")),
			Reason:      rapid.SampledFrom(append(grant.Reasons(), grant.None)).Draw(t, "reason"),
			Wait:        drawDuration(t, "wait"),
			Policy:      drawCopy(t),
		}
		if a.Result == grant.Granted {
			a.Units = drawUnits(t, "units", 0, grant.MaxQuantum)
			a.TTL = time.Duration(rapid.Int64Range(1, int64(grant.MaxTTL)).Draw(t, "ttl"))
		}
		same(t, a, ToGrantResponse(&a), with(a.Incarnation, FromGrantResponse))
	})
}

func drawCheckRequest(t *rapid.T) grant.CheckRequest {
	r := grant.CheckRequest{
		Tenant:       drawTenant(t),
		Class:        drawClass(t),
		Count:        drawUnits(t, "count", 0, grant.MaxUnits),
		Attempt:      grant.Attempt{Incarnation: drawIncarnation(t), Seq: rapid.Uint64Min(1).Draw(t, "seq")},
		Budget:       drawDuration(t, "budget"),
		KnownVersion: rapid.Uint64().Draw(t, "known"),
	}
	r.Sum = r.Fingerprint()
	return r
}

func TestCheckRequestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawCheckRequest(t)
		same(t, r, ToCheckRequest(&r), with(r.Attempt.Incarnation, FromCheckRequest))
		same(t, r, ToUnaryCheckRequest(&r), FromUnaryCheckRequest)
	})
}

// A budget that is used up stays used up: it must not turn into "absent".
func TestSpentBudget(t *testing.T) {
	r := grant.CheckRequest{
		Tenant: "a", Class: "c", Count: 1,
		Attempt: grant.Attempt{Incarnation: grant.Incarnation{1}, Seq: 1},
		Budget:  -time.Second,
	}
	r.Sum = r.Fingerprint()
	link, err := FromCheckRequest(ToCheckRequest(&r), r.Attempt.Incarnation)
	if err != nil || link.Budget != 0 {
		t.Errorf("link: budget %v, %v", link.Budget, err)
	}
	unary, err := FromUnaryCheckRequest(ToUnaryCheckRequest(&r))
	if err != nil || unary.Budget != 0 {
		t.Errorf("unary: budget %v, %v", unary.Budget, err)
	}
}

func TestCheckAnswerRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := grant.CheckAnswer{
			Tenant:     drawTenant(t),
			Attempt:    grant.Attempt{Incarnation: drawIncarnation(t), Seq: rapid.Uint64Min(1).Draw(t, "seq")},
			Verdict:    grant.Verdict(rapid.IntRange(int(grant.Allow), int(grant.Undecided)).Draw(t, "verdict")),
			Reason:     rapid.SampledFrom(append(grant.Reasons(), grant.None)).Draw(t, "reason"),
			Cost:       drawUnits(t, "cost", 0, grant.MaxUnits),
			RetryAfter: drawDuration(t, "retry"),
			Affordable: drawDuration(t, "affordable"),
			Replayed:   rapid.Bool().Draw(t, "replayed"),
			Shadow:     rapid.Bool().Draw(t, "shadow"),
			Remaining:  drawUnits(t, "remaining", 0, grant.MaxUnits),
			Policy:     drawCopy(t),
		}
		same(t, a, ToCheckResponse(&a), with(a.Attempt.Incarnation, FromCheckResponse))
	})
}

func TestPolicyRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		same(t, p, ToPolicy(p), FromPolicy)
		tp := TenantPolicy{Tenant: drawTenant(t), Version: rapid.Uint64().Draw(t, "version"), Policy: p}
		same(t, tp, ToTenantPolicy(tp), FromTenantPolicy)
	})
	gone := TenantPolicy{Tenant: "a", Version: 3, Deleted: true}
	if back, err := FromTenantPolicy(ToTenantPolicy(gone)); err != nil || back != gone {
		t.Errorf("a deleted tenant comes back as %+v, %v", back, err)
	}
}

// One message is one allocation: conversion runs for every request.
func TestAllocations(t *testing.T) {
	g := grant.GrantRequest{Tenant: "tenant", Incarnation: grant.Incarnation{1}, ID: 1, Want: 10, Min: 1, Age: 1}
	g.Sum = g.Fingerprint()
	c := grant.CheckRequest{Tenant: "tenant", Class: "class", Count: 1, Attempt: grant.Attempt{Incarnation: grant.Incarnation{1}, Seq: 1}, Budget: 1}
	c.Sum = c.Fingerprint()
	ga := grant.GrantAnswer{Tenant: "tenant", ID: 1, Result: grant.Granted, Units: 3, TTL: time.Second, Wait: 1}
	ca := grant.CheckAnswer{Tenant: "tenant", Attempt: c.Attempt, Verdict: grant.Deny, Reason: grant.Over, RetryAfter: 1, Affordable: 1}
	gm, cm, gam, cam := ToGrantRequest(&g), ToCheckRequest(&c), ToGrantResponse(&ga), ToCheckResponse(&ca)
	for _, one := range []struct {
		name string
		want float64
		run  func()
	}{
		{"ToGrantRequest", 1, func() { ToGrantRequest(&g) }},
		{"ToGrantResponse", 1, func() { ToGrantResponse(&ga) }},
		{"ToCheckRequest", 1, func() { ToCheckRequest(&c) }},
		{"ToCheckResponse", 1, func() { ToCheckResponse(&ca) }},
		{"FromGrantRequest", 0, func() { FromGrantRequest(gm, g.Incarnation) }},
		{"FromGrantResponse", 0, func() { FromGrantResponse(gam, g.Incarnation) }},
		{"FromCheckRequest", 0, func() { FromCheckRequest(cm, g.Incarnation) }},
		{"FromCheckResponse", 0, func() { FromCheckResponse(cam, g.Incarnation) }},
	} {
		if got := testing.AllocsPerRun(100, one.run); got > one.want {
			t.Errorf("%s allocates %v times, allowed is %v", one.name, got, one.want)
		}
	}
}

func BenchmarkFromCheckRequest(b *testing.B) {
	c := grant.CheckRequest{Tenant: "tenant", Class: "class", Count: 1, Attempt: grant.Attempt{Incarnation: grant.Incarnation{1}, Seq: 1}, Budget: 1}
	c.Sum = c.Fingerprint()
	m := ToCheckRequest(&c)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := FromCheckRequest(m, c.Attempt.Incarnation); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkToCheckResponse(b *testing.B) {
	a := grant.CheckAnswer{Tenant: "tenant", Verdict: grant.Deny, Reason: grant.Over, RetryAfter: 1, Affordable: 1}
	b.ReportAllocs()
	for b.Loop() {
		ToCheckResponse(&a)
	}
}
