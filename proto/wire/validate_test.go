package wire

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

var self = grant.Incarnation{1}

// refused proves that the error is of type Problems and names exactly the field.
func refused(t *testing.T, what string, err error, field string) {
	t.Helper()
	var p Problems
	if !errors.As(err, &p) {
		t.Errorf("%s: error is %v, wanted a problem with %s", what, err, field)
		return
	}
	if len(p) != 1 || p[0].Field != field || p[0].Given == "" || p[0].Allowed == "" {
		t.Errorf("%s: got %q, wanted one complete problem with %s", what, p, field)
	}
	if len(p.Error()) > 400 {
		t.Errorf("%s: error of %d bytes", what, len(p.Error()))
	}
}

// Every fault of a request is refused under the name of its field (cases 10,
// 15 and 28: zero, negative, huge, strange ids, other parameters).
func TestGrantRequestFaults(t *testing.T) {
	for _, one := range []struct {
		field string
		spoil func(m *stipendv1.GrantRequest)
	}{
		{"tenant", func(m *stipendv1.GrantRequest) { m.Tenant = "" }},
		{"tenant", func(m *stipendv1.GrantRequest) { m.Tenant = "a\x00b" }},
		{"tenant", func(m *stipendv1.GrantRequest) { m.Tenant = "\xff" }},
		{"tenant", func(m *stipendv1.GrantRequest) { m.Tenant = strings.Repeat("x", 1<<20) }},
		{"grant_id", func(m *stipendv1.GrantRequest) { m.GrantId = 0 }},
		{"want", func(m *stipendv1.GrantRequest) { m.Want = 0 }},
		{"want", func(m *stipendv1.GrantRequest) { m.Want = -1 }},
		{"min", func(m *stipendv1.GrantRequest) { m.Min = 0 }},
		{"min", func(m *stipendv1.GrantRequest) { m.Min = m.Want + 1 }},
		{"held", func(m *stipendv1.GrantRequest) { m.Held = -1 }},
		{"held", func(m *stipendv1.GrantRequest) { m.Held = int64(grant.MaxQuantum) + 1 }},
		{"age", func(m *stipendv1.GrantRequest) { m.Age = durationpb.New(-1) }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.Fingerprint = nil }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.Fingerprint = m.Fingerprint[:15] }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.Tenant = "another" }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.Want++ }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.Min++ }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.Held++ }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.Emergency = true }},
		{"fingerprint", func(m *stipendv1.GrantRequest) { m.GrantId++ }},
	} {
		r := grant.GrantRequest{Tenant: "a", Incarnation: self, ID: 1, Want: 10, Min: 5}
		r.Sum = r.Fingerprint()
		m := ToGrantRequest(&r)
		if _, err := FromGrantRequest(m, self); err != nil {
			t.Fatalf("the sound request is refused: %v", err)
		}
		one.spoil(m)
		got, err := FromGrantRequest(m, self)
		refused(t, fmt.Sprintf("%.80v", m), err, one.field)
		if got != (grant.GrantRequest{}) {
			t.Errorf("%s: something of the faulty message came back: %+v", one.field, got)
		}
	}
	_, err := FromGrantRequest(nil, self)
	refused(t, "nil", err, "grant request")
	r := grant.GrantRequest{Tenant: "a", Incarnation: grant.Incarnation{2}, ID: 1, Want: 10, Min: 5}
	r.Sum = r.Fingerprint()
	_, err = FromGrantRequest(ToGrantRequest(&r), self)
	refused(t, "the request of another incarnation", err, "fingerprint")
}

func TestCheckRequestFaults(t *testing.T) {
	for _, one := range []struct {
		field string
		spoil func(m *stipendv1.CheckRequest)
	}{
		{"tenant", func(m *stipendv1.CheckRequest) { m.Tenant = "" }},
		{"route_class", func(m *stipendv1.CheckRequest) { m.RouteClass = "" }},
		{"route_class", func(m *stipendv1.CheckRequest) { m.RouteClass = "GET /v1/x?y" }},
		{"count", func(m *stipendv1.CheckRequest) { m.Count = -1 }},
		{"count", func(m *stipendv1.CheckRequest) { m.Count = math.MinInt64 }},
		{"sequence", func(m *stipendv1.CheckRequest) { m.Sequence = 0 }},
		{"budget", func(m *stipendv1.CheckRequest) { m.Budget = nil }},
		{"budget", func(m *stipendv1.CheckRequest) { m.Budget = durationpb.New(-time.Nanosecond) }},
		{"incarnation", func(m *stipendv1.CheckRequest) { m.Incarnation = []byte{1} }},
		{"incarnation", func(m *stipendv1.CheckRequest) { m.Incarnation = make([]byte, 16) }},
		{"fingerprint", func(m *stipendv1.CheckRequest) { m.Fingerprint = nil }},
		{"fingerprint", func(m *stipendv1.CheckRequest) { m.Count = 1000 }},
		{"fingerprint", func(m *stipendv1.CheckRequest) { m.RouteClass = "other" }},
	} {
		r := grant.CheckRequest{Tenant: "a", Class: "c", Count: 1, Attempt: grant.Attempt{Incarnation: self, Seq: 7}}
		r.Sum = r.Fingerprint()
		m := ToCheckRequest(&r)
		if _, err := FromCheckRequest(m, self); err != nil {
			t.Fatalf("the sound request is refused: %v", err)
		}
		one.spoil(m)
		_, err := FromCheckRequest(m, self)
		refused(t, fmt.Sprintf("%.80v", m), err, one.field)
	}
}

// A unary caller may leave out fingerprint and budget, but a fingerprint that
// it sends must be that of its parameters: a constant one would buy any number
// of operations for the price of the first.
func TestUnaryCheckRequest(t *testing.T) {
	m := &stipendv1.CheckRequest{Tenant: "a", RouteClass: "c", Count: 2, Incarnation: self[:], Sequence: 1}
	r, err := FromUnaryCheckRequest(m)
	if err != nil || r.Sum != r.Fingerprint() || r.Budget != NoBudget {
		t.Fatalf("%+v, %v", r, err)
	}
	m.Fingerprint = r.Sum[:]
	m.Count = 1000
	_, err = FromUnaryCheckRequest(m)
	refused(t, "copied fingerprint", err, "fingerprint")
	m.Fingerprint, m.Incarnation = nil, nil
	_, err = FromUnaryCheckRequest(m)
	refused(t, "no incarnation", err, "incarnation")
	m.Incarnation = make([]byte, 16)
	_, err = FromUnaryCheckRequest(m)
	refused(t, "zero incarnation", err, "incarnation")
}

func TestAnswerFaults(t *testing.T) {
	sound := func() *stipendv1.GrantResponse {
		return ToGrantResponse(&grant.GrantAnswer{Tenant: "a", ID: 1, Result: grant.Granted, Units: 5, TTL: time.Second})
	}
	if _, err := FromGrantResponse(sound(), self); err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct {
		field string
		spoil func(m *stipendv1.GrantResponse)
	}{
		{"tenant", func(m *stipendv1.GrantResponse) { m.Tenant = "" }},
		{"grant_id", func(m *stipendv1.GrantResponse) { m.GrantId = 0 }},
		{"result", func(m *stipendv1.GrantResponse) { m.Result = 0 }},
		{"result", func(m *stipendv1.GrantResponse) { m.Result = 99 }},
		{"reason", func(m *stipendv1.GrantResponse) { m.Reason = 99 }},
		{"reason", func(m *stipendv1.GrantResponse) { m.Reason = 256 }}, // must not wrap to None
		{"units", func(m *stipendv1.GrantResponse) { m.Units = -1 }},
		{"units", func(m *stipendv1.GrantResponse) { m.Units = int64(grant.MaxQuantum) + 1 }},
		{"units", func(m *stipendv1.GrantResponse) { m.Result = stipendv1.GrantResult_GRANT_RESULT_EMPTY }},
		{"ttl", func(m *stipendv1.GrantResponse) { m.Ttl = nil }},
		{"ttl", func(m *stipendv1.GrantResponse) { m.Ttl = durationpb.New(grant.MaxTTL + 1) }},
		{"wait", func(m *stipendv1.GrantResponse) { m.Wait = durationpb.New(-1) }},
		{"policy.version", func(m *stipendv1.GrantResponse) { m.Policy = &stipendv1.PolicyCopy{} }},
	} {
		m := sound()
		one.spoil(m)
		_, err := FromGrantResponse(m, self)
		refused(t, fmt.Sprint(m), err, one.field)
	}
	check := func() *stipendv1.CheckResponse {
		return ToCheckResponse(&grant.CheckAnswer{Tenant: "a", Attempt: grant.Attempt{Seq: 1}, Verdict: grant.Allow})
	}
	if _, err := FromCheckResponse(check(), self); err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct {
		field string
		spoil func(m *stipendv1.CheckResponse)
	}{
		{"sequence", func(m *stipendv1.CheckResponse) { m.Sequence = 0 }},
		{"verdict", func(m *stipendv1.CheckResponse) { m.Verdict = 0 }},
		{"cost", func(m *stipendv1.CheckResponse) { m.Cost = -1 }},
		{"remaining", func(m *stipendv1.CheckResponse) { m.Remaining = -1 }},
		{"retry_after", func(m *stipendv1.CheckResponse) { m.RetryAfter = durationpb.New(-1) }},
		{"affordable", func(m *stipendv1.CheckResponse) { m.Affordable = durationpb.New(-1) }},
	} {
		m := check()
		one.spoil(m)
		_, err := FromCheckResponse(m, self)
		refused(t, fmt.Sprint(m), err, one.field)
	}
}

func TestDurationEnds(t *testing.T) {
	const most = time.Duration(math.MaxInt64)
	if d, err := fromDuration("x", durationpb.New(most)); err != nil || d != most {
		t.Errorf("the longest duration: %v, %v", d, err)
	}
	for _, d := range []*durationpb.Duration{
		{Seconds: maxSeconds, Nanos: int32(int64(most)%int64(time.Second)) + 1},
		{Seconds: maxSeconds + 1},
		{Seconds: 18_446_744_074}, // wraps to 290 ms
		{Seconds: math.MaxInt64},
		{Seconds: math.MinInt64},
		{Nanos: 1e9},
		{Nanos: -1},
		{Seconds: 1, Nanos: -1},
	} {
		got, err := fromDuration("x", d)
		refused(t, fmt.Sprintf("%v read as %v", d, got), err, "x")
	}
}

// All faults of a policy are reported at once, each once.
func TestPolicyFaults(t *testing.T) {
	m := &stipendv1.Policy{
		Plan:  "\xff",
		Rate:  &stipendv1.Rate{Units: 5, Per: durationpb.New(-1)},
		Burst: -1,
		Classes: []*stipendv1.RouteClass{
			{Name: "a", Cost: -1}, {Name: "a"}, {Name: "b c"}, {Name: "d", Emergency: true}, nil,
		},
		Grant: &stipendv1.GrantSettings{Quantum: -1, Owners: grant.MaxOwners + 1, Ttl: durationpb.New(-1)},
		Mode:  9,
	}
	p, err := FromPolicy(m)
	var found Problems
	if p != nil || !errors.As(err, &found) {
		t.Fatalf("%v, %v", p, err)
	}
	var fields []string
	for _, f := range found {
		fields = append(fields, f.Field)
	}
	const want = "rate grant.ttl mode classes.a classes[2].name classes[4].name plan burst grant.quantum grant.owners"
	if got := strings.Join(fields, " "); got != want {
		t.Errorf("fields\n%s\nwanted\n%s\n%v", got, want, err)
	}

	many := &stipendv1.Policy{}
	for i := range grant.MaxClasses + 1 {
		many.Classes = append(many.Classes, &stipendv1.RouteClass{Name: fmt.Sprintf("c%d", i)})
	}
	_, err = FromPolicy(many)
	refused(t, "too many classes", err, "classes")
	many.Classes = many.Classes[1:]
	if p, err := FromPolicy(many); err != nil || len(p.Classes) != grant.MaxClasses {
		t.Errorf("as many classes as allowed: %v", err)
	}
	if p, err := FromPolicy(nil); p != nil || err != nil {
		t.Errorf("nil: %v, %v", p, err)
	}
	_, err = FromTenantPolicy(&stipendv1.TenantPolicy{Tenant: "a"})
	refused(t, "a live tenant without a policy", err, "policy")
	if _, err := FromOwner(""); err == nil {
		t.Error("an empty owner was accepted")
	}
}
