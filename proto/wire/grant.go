package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// ToGrantRequest makes the message for a link; Sum must have been computed.
func ToGrantRequest(r *grant.GrantRequest) *stipendv1.GrantRequest {
	box := new(struct {
		m   stipendv1.GrantRequest
		age durationpb.Duration
		sum grant.Fingerprint
	})
	box.sum = r.Sum
	m := &box.m
	m.Tenant = string(r.Tenant)
	m.Emergency = r.Emergency
	m.GrantId = uint64(r.ID)
	m.Want = int64(r.Want)
	m.Min = int64(r.Min)
	m.Held = int64(r.Held)
	m.Fingerprint = box.sum[:]
	m.Age = optional(&box.age, r.Age)
	m.KnownVersion = r.KnownVersion
	return m
}

// FromGrantRequest reads a request that came over the link of incarnation inc.
// want, min: 1 to MaxUnits with min <= want; held: 0 to MaxQuantum.
func FromGrantRequest(m *stipendv1.GrantRequest, inc grant.Incarnation) (grant.GrantRequest, error) {
	if m == nil {
		return grant.GrantRequest{}, missing("grant request")
	}
	r := grant.GrantRequest{
		Incarnation:  inc,
		Emergency:    m.Emergency,
		ID:           grant.GrantID(m.GrantId),
		KnownVersion: m.KnownVersion,
	}
	var err error
	if r.Tenant, err = fromTenant(m.Tenant); err != nil {
		return grant.GrantRequest{}, err
	}
	if r.ID == 0 {
		return grant.GrantRequest{}, problem("grant_id", 0, "1 or more")
	}
	if r.Want, err = fromUnits("want", m.Want, 1, grant.MaxUnits); err != nil {
		return grant.GrantRequest{}, err
	}
	if r.Min, err = fromUnits("min", m.Min, 1, r.Want); err != nil {
		return grant.GrantRequest{}, err
	}
	if r.Held, err = fromUnits("held", m.Held, 0, grant.MaxQuantum); err != nil {
		return grant.GrantRequest{}, err
	}
	if r.Age, err = fromDuration("age", m.Age); err != nil {
		return grant.GrantRequest{}, err
	}
	r.Sum = r.Fingerprint()
	if err := testSum(m.Fingerprint, r.Sum); err != nil {
		return grant.GrantRequest{}, err
	}
	return r, nil
}

// ToGrantResponse makes the message for the link of a.Incarnation.
func ToGrantResponse(a *grant.GrantAnswer) *stipendv1.GrantResponse {
	box := new(struct {
		m         stipendv1.GrantResponse
		ttl, wait durationpb.Duration
	})
	m := &box.m
	m.Tenant = string(a.Tenant)
	m.Emergency = a.Emergency
	m.GrantId = uint64(a.ID)
	m.Result = ToGrantResult(a.Result)
	m.Reason = ToReason(a.Reason)
	m.Units = int64(a.Units)
	m.Ttl = optional(&box.ttl, a.TTL)
	m.Wait = optional(&box.wait, a.Wait)
	m.Policy = ToPolicyCopy(a.Policy)
	return m
}

// FromGrantResponse reads an answer that came over the link of incarnation inc.
// Only granted carries units (0 to MaxQuantum) and a ttl (up to MaxTTL, not 0).
func FromGrantResponse(m *stipendv1.GrantResponse, inc grant.Incarnation) (grant.GrantAnswer, error) {
	if m == nil {
		return grant.GrantAnswer{}, missing("grant response")
	}
	a := grant.GrantAnswer{Incarnation: inc, Emergency: m.Emergency, ID: grant.GrantID(m.GrantId)}
	var err error
	if a.Tenant, err = fromTenant(m.Tenant); err != nil {
		return grant.GrantAnswer{}, err
	}
	if a.ID == 0 {
		return grant.GrantAnswer{}, problem("grant_id", 0, "1 or more")
	}
	if a.Result, err = FromGrantResult(m.Result); err != nil {
		return grant.GrantAnswer{}, err
	}
	if a.Reason, err = FromReason(m.Reason); err != nil {
		return grant.GrantAnswer{}, err
	}
	if a.Units, err = fromUnits("units", m.Units, 0, grant.MaxQuantum); err != nil {
		return grant.GrantAnswer{}, err
	}
	if a.TTL, err = fromDuration("ttl", m.Ttl); err != nil {
		return grant.GrantAnswer{}, err
	}
	if a.Wait, err = fromDuration("wait", m.Wait); err != nil {
		return grant.GrantAnswer{}, err
	}
	if a.Result == grant.Granted {
		if a.TTL == 0 || a.TTL > grant.MaxTTL {
			return grant.GrantAnswer{}, problem("ttl", a.TTL, "with result granted 1ns to "+grant.MaxTTL.String())
		}
	} else if a.Units != 0 {
		return grant.GrantAnswer{}, problem("units", a.Units, "0 with result "+a.Result.String())
	}
	if a.Policy, err = FromPolicyCopy(m.Policy); err != nil {
		return grant.GrantAnswer{}, err
	}
	return a, nil
}
