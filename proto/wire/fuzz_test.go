package wire

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// fuzz proves for any bytes: From never panics; what it refuses it names; what
// it accepts has a canonical message that reads back as the same value.
func fuzz[P any, M proto.Message](f *testing.F, seed M, from func(M) (P, error), to func(P) M) {
	raw, err := proto.Marshal(seed)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := seed.ProtoReflect().New().Interface().(M)
		if proto.Unmarshal(raw, m) != nil {
			return
		}
		p, err := from(m)
		if err != nil {
			var found Problems
			if !errors.As(err, &found) || len(found) == 0 {
				t.Fatalf("an error without a problem: %v", err)
			}
			return
		}
		canonical := to(p)
		back, err := from(canonical)
		if err != nil {
			t.Fatalf("%v was accepted, its canonical form %v is not: %v", m, canonical, err)
		}
		if again := to(back); !proto.Equal(canonical, again) {
			t.Fatalf("%v\n%v", canonical, again)
		}
	})
}

func seedPolicy() *grant.Policy {
	return &grant.Policy{
		Plan: "pro", Rate: grant.Rate{Units: 100, Per: 1e9}, Burst: 200,
		Classes:   map[grant.RouteClass]grant.Class{"read": {Cost: 1, Emergency: true}, "write": {Cost: 5, Central: true}},
		Grant:     grant.GrantSettings{Quantum: 10, Owners: 3, TTL: 10e9},
		Emergency: &grant.Emergency{Rate: grant.Rate{Units: 1, Per: 1e9}, Burst: 5, Grant: grant.GrantSettings{Quantum: 5, Owners: 1, TTL: 60e9}},
	}
}

func FuzzGrantRequest(f *testing.F) {
	r := grant.GrantRequest{Tenant: "a", Incarnation: self, ID: 1, Want: 10, Min: 5, Age: 3}
	r.Sum = r.Fingerprint()
	fuzz(f, ToGrantRequest(&r), with(self, FromGrantRequest),
		func(r grant.GrantRequest) *stipendv1.GrantRequest { return ToGrantRequest(&r) })
}

func FuzzGrantResponse(f *testing.F) {
	a := grant.GrantAnswer{Tenant: "a", ID: 1, Result: grant.Granted, Units: 5, TTL: 1e9, Policy: grant.PolicyCopy{Version: 1, Policy: seedPolicy()}}
	fuzz(f, ToGrantResponse(&a), with(self, FromGrantResponse),
		func(a grant.GrantAnswer) *stipendv1.GrantResponse { return ToGrantResponse(&a) })
}

func FuzzCheckRequest(f *testing.F) {
	fuzz(f, &stipendv1.CheckRequest{Tenant: "a", RouteClass: "c", Count: 2, Incarnation: self[:], Sequence: 1}, FromUnaryCheckRequest,
		func(r grant.CheckRequest) *stipendv1.CheckRequest { return ToUnaryCheckRequest(&r) })
}

func FuzzCheckResponse(f *testing.F) {
	a := grant.CheckAnswer{Tenant: "a", Attempt: grant.Attempt{Seq: 1}, Verdict: grant.Deny, Reason: grant.Over, RetryAfter: 1, Affordable: 2}
	fuzz(f, ToCheckResponse(&a), with(self, FromCheckResponse),
		func(a grant.CheckAnswer) *stipendv1.CheckResponse { return ToCheckResponse(&a) })
}

func FuzzTenantPolicy(f *testing.F) {
	fuzz(f, ToTenantPolicy(TenantPolicy{Tenant: "a", Version: 4, Policy: seedPolicy()}), FromTenantPolicy, ToTenantPolicy)
}
