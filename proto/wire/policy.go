package wire

import (
	"fmt"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// TenantPolicy is one tenant's policy and the version it has in the ledger.
// Policy is nil when the tenant was deleted without one left to show.
type TenantPolicy struct {
	Tenant  grant.TenantID
	Version uint64
	Policy  *grant.Policy
	Deleted bool
}

// ToTenantPolicy makes the message of the policy.
func ToTenantPolicy(t TenantPolicy) *stipendv1.TenantPolicy {
	return &stipendv1.TenantPolicy{
		Tenant:  string(t.Tenant),
		Version: t.Version,
		Policy:  ToPolicy(t.Policy),
		Deleted: t.Deleted,
	}
}

// FromTenantPolicy reads a policy push or an entry of a list. Only a deleted
// tenant may come without a policy.
func FromTenantPolicy(m *stipendv1.TenantPolicy) (TenantPolicy, error) {
	if m == nil {
		return TenantPolicy{}, missing("tenant policy")
	}
	tenant, err := fromTenant(m.Tenant)
	if err != nil {
		return TenantPolicy{}, err
	}
	t := TenantPolicy{Tenant: tenant, Version: m.Version, Deleted: m.Deleted}
	if m.Policy == nil && !m.Deleted {
		return TenantPolicy{}, missing("policy")
	}
	if t.Policy, err = FromPolicy(m.Policy); err != nil {
		return TenantPolicy{}, err
	}
	return t, nil
}

// ToPolicyCopy makes the message of the copy; nil when there is none.
func ToPolicyCopy(c grant.PolicyCopy) *stipendv1.PolicyCopy {
	if c.Version == 0 && c.Policy == nil {
		return nil
	}
	return &stipendv1.PolicyCopy{Version: c.Version, Policy: ToPolicy(c.Policy)}
}

// FromPolicyCopy reads the copy that came with an answer; nil is no copy.
func FromPolicyCopy(m *stipendv1.PolicyCopy) (grant.PolicyCopy, error) {
	if m == nil {
		return grant.PolicyCopy{}, nil
	}
	if m.Version == 0 {
		return grant.PolicyCopy{}, problem("policy.version", 0, "1 or more")
	}
	p, err := FromPolicy(m.Policy)
	if err != nil {
		return grant.PolicyCopy{}, err
	}
	return grant.PolicyCopy{Version: m.Version, Policy: p}, nil
}

// ToPolicy makes the message of the policy, classes in order of name, so that
// equal policies make equal messages. Nil makes nil.
func ToPolicy(p *grant.Policy) *stipendv1.Policy {
	if p == nil {
		return nil
	}
	m := &stipendv1.Policy{
		Plan:  p.Plan,
		Rate:  toRate(p.Rate),
		Burst: int64(p.Burst),
		Grant: toSettings(p.Grant),
		Mode:  ToMode(p.Mode),
	}
	if len(p.Classes) > 0 {
		classes := make([]stipendv1.RouteClass, len(p.Classes))
		m.Classes = make([]*stipendv1.RouteClass, len(p.Classes))
		for i, name := range p.ClassNames() {
			c, w := p.Classes[name], &classes[i]
			w.Name, w.Cost, w.Central, w.Emergency = string(name), int64(c.Cost), c.Central, c.Emergency
			m.Classes[i] = w
		}
	}
	if e := p.Emergency; e != nil {
		m.Emergency = &stipendv1.EmergencyBudget{Rate: toRate(e.Rate), Burst: int64(e.Burst), Grant: toSettings(e.Grant)}
	}
	return m
}

func toRate(r grant.Rate) *stipendv1.Rate {
	if r == (grant.Rate{}) {
		return nil
	}
	return &stipendv1.Rate{Units: int64(r.Units), Per: durationpb.New(r.Per)}
}

func toSettings(g grant.GrantSettings) *stipendv1.GrantSettings {
	if g == (grant.GrantSettings{}) {
		return nil
	}
	m := &stipendv1.GrantSettings{Quantum: int64(g.Quantum), Owners: int32(g.Owners)}
	if g.TTL != 0 {
		m.Ttl = durationpb.New(g.TTL)
	}
	return m
}

// FromPolicy reads a policy and reports every fault at once, those of
// grant.Policy.Validate included, with field paths as in a policy's YAML form.
// Absent parts are zero: a policy without a rate brings nothing. Nil is nil.
func FromPolicy(m *stipendv1.Policy) (*grant.Policy, error) {
	if m == nil {
		return nil, nil
	}
	var faults Problems
	note := func(err error) {
		if err != nil {
			faults = append(faults, err.(Problems)...)
		}
	}
	p := &grant.Policy{Plan: m.Plan, Burst: grant.Units(m.Burst)}
	var err error
	p.Rate, err = fromRate("rate", m.Rate)
	note(err)
	p.Grant, err = fromSettings("grant", m.Grant)
	note(err)
	p.Mode, err = FromMode(m.Mode)
	note(err)
	if e := m.Emergency; e != nil {
		p.Emergency = &grant.Emergency{Burst: grant.Units(e.Burst)}
		p.Emergency.Rate, err = fromRate("emergency.rate", e.Rate)
		note(err)
		p.Emergency.Grant, err = fromSettings("emergency.grant", e.Grant)
		note(err)
	}
	p.Classes, err = fromClasses(m.Classes)
	note(err)
	for _, found := range p.Validate() {
		if !faults.covers(found.Field) {
			faults = append(faults, found)
		}
	}
	if len(faults) > 0 {
		return nil, faults
	}
	return p, nil
}

// covers reports whether a fault of the field is known already: its value was
// not read then, and what Validate says of the zero in its place misleads.
func (p Problems) covers(field string) bool {
	for _, one := range p {
		if one.Field == field {
			return true
		}
	}
	return false
}

func fromRate(field string, m *stipendv1.Rate) (grant.Rate, error) {
	if m == nil {
		return grant.Rate{}, nil
	}
	per, err := fromDuration(field, m.Per)
	if err != nil {
		return grant.Rate{}, err
	}
	return grant.Rate{Units: grant.Units(m.Units), Per: per}, nil
}

func fromSettings(field string, m *stipendv1.GrantSettings) (grant.GrantSettings, error) {
	if m == nil {
		return grant.GrantSettings{}, nil
	}
	ttl, err := fromDuration(field+".ttl", m.Ttl)
	return grant.GrantSettings{Quantum: grant.Units(m.Quantum), Owners: int(m.Owners), TTL: ttl}, err
}

func fromClasses(list []*stipendv1.RouteClass) (map[grant.RouteClass]grant.Class, error) {
	if len(list) > grant.MaxClasses { // before anything is kept of them
		return nil, problem("classes", fmt.Sprintf("%d classes", len(list)), fmt.Sprintf("at most %d", grant.MaxClasses))
	}
	if len(list) == 0 {
		return nil, nil
	}
	var faults Problems
	classes := make(map[grant.RouteClass]grant.Class, len(list))
	for i, m := range list {
		name, err := fromClass(fmt.Sprintf("classes[%d].name", i), m.GetName())
		if err != nil {
			faults = append(faults, err.(Problems)...)
			continue
		}
		if _, twice := classes[name]; twice {
			faults = append(faults, grant.Problem{Field: "classes." + string(name), Given: "twice", Allowed: "each class once"})
			continue
		}
		classes[name] = grant.Class{Cost: grant.Units(m.GetCost()), Central: m.GetCentral(), Emergency: m.GetEmergency()}
	}
	if faults != nil {
		return nil, faults
	}
	return classes, nil
}
