package conf

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/stipend/stipend/proto/grant"
)

// TenantPolicy is one tenant of a policy file, with its plan and its overrides
// resolved into one sound policy.
type TenantPolicy struct {
	Tenant grant.TenantID
	Policy *grant.Policy
	// Strict asks the caller to refuse, not only to warn of, a policy that
	// cannot keep the utilisation promise. It is a key of the whole file.
	Strict bool
	At     Position // of the tenant in the file
}

// policyFile is the form of the policy file.
type policyFile struct {
	Strict  bool                  `yaml:"strict"`
	Plans   map[string]policySpec `yaml:"plans"`
	Tenants map[string]tenantSpec `yaml:"tenants"`
}

// tenantSpec overrides what it names of a plan, down to single fields of its
// classes and grant settings.
type tenantSpec struct {
	Plan       *string `yaml:"plan"`
	policySpec `yaml:",inline"`
}

// policySpec is a policy in which every part may be missing.
type policySpec struct {
	// MadeFrom names the plan in a policy that is written out in full.
	MadeFrom  *string              `yaml:"made_from"`
	Mode      *grant.Mode          `yaml:"mode"`
	Rate      *grant.Rate          `yaml:"rate"`
	Burst     *grant.Units         `yaml:"burst"`
	Grant     *settingsSpec        `yaml:"grant"`
	Classes   map[string]classSpec `yaml:"classes"`
	Emergency *emergencySpec       `yaml:"emergency"`
}

type settingsSpec struct {
	Quantum *grant.Units   `yaml:"quantum"`
	Owners  *int           `yaml:"owners"`
	TTL     *time.Duration `yaml:"ttl"`
}

type classSpec struct {
	Cost      *grant.Units `yaml:"cost" conf:"scalar"`
	Central   *bool        `yaml:"central"`
	Emergency *bool        `yaml:"emergency"`
}

type emergencySpec struct {
	Rate  *grant.Rate   `yaml:"rate"`
	Burst *grant.Units  `yaml:"burst"`
	Grant *settingsSpec `yaml:"grant"`
}

// LoadPolicies reads a policy file:
//
//	strict: true
//	plans:
//	  pro:
//	    rate: 600 per 1m
//	    burst: 200
//	    classes:
//	      read: 1
//	      write: {cost: 5, central: true}
//	    grant: {quantum: 10, owners: 8, ttl: 10s}
//	tenants:
//	  acme: {plan: pro, burst: 400}
//
// and resolves each tenant's policy, in order of tenant. Every plan must be
// sound by itself, but may leave rate, burst or classes to its tenants. The
// error is of type Problems, or says that the file could not be read; then
// there are no policies at all: keep the old ones.
func LoadPolicies(path string) ([]TenantPolicy, error) {
	raw, err := readFile(path)
	if err != nil {
		return nil, err
	}
	return ParsePolicies(path, raw)
}

// ParsePolicies is LoadPolicies of what a file called name holds.
func ParsePolicies(name string, raw []byte) ([]TenantPolicy, error) {
	root, err := parse(name, raw)
	if err != nil {
		return nil, err
	}
	r := newReader(name)
	var file policyFile
	if root == nil {
		r.fault(Position{Source: name}, "", "is empty", "write tenants: and at least one tenant, or tenants: {}")
		return nil, r.faults.errOrNil()
	}
	r.decode(root, reflect.ValueOf(&file).Elem(), "", options{})
	if _, given := r.at["tenants"]; !given && len(r.faults) == 0 {
		r.fault(Position{Source: name}, "tenants", "is missing", "write at least one tenant, or tenants: {} when all are meant to be gone")
	}
	if len(r.faults) > 0 {
		return nil, r.faults.errOrNil() // what was not read cannot be judged
	}
	plans := map[string][]grant.Problem{}
	for plan, spec := range file.Plans {
		path := join("plans", quoteKey(plan))
		if plan == "" {
			r.fault(r.nearestAt(path), path, "has no name", "give the plan one")
		}
		if spec.MadeFrom != nil {
			r.fault(r.nearestAt(path), join(path, "made_from"), "stands in a plan", "remove it: the plan has its own name")
		}
		for _, name := range slices.Sorted(maps.Keys(spec.Classes)) {
			if spec.Classes[name].Cost == nil {
				at := join(join(path, "classes"), quoteKey(name))
				r.fault(r.nearestAt(at), join(at, "cost"), "is missing", "give it: a class without one would be free; write 0 if that is meant")
			}
		}
		p := spec.resolve(nil)
		p.Plan = plan
		plans[plan] = p.Validate()
		for _, found := range plans[plan] {
			r.reportAt(path, found)
		}
	}
	var out []TenantPolicy
	for _, tenant := range slices.Sorted(maps.Keys(file.Tenants)) {
		path := join("tenants", quoteKey(tenant))
		at := r.nearestAt(path)
		if err := grant.TenantID(tenant).Validate(); err != nil {
			what := strings.TrimPrefix(err.Error(), "tenant: ")
			if len(what) > 200 {
				what = fmt.Sprintf("has %d bytes", len(tenant))
			}
			r.fault(at, path, what, "the id must be that of the verified credentials")
			continue
		}
		p, ok := r.resolve(file, tenant, path, plans)
		if ok {
			out = append(out, TenantPolicy{Tenant: grant.TenantID(tenant), Policy: p, Strict: file.Strict, At: at})
		}
	}
	if len(r.faults) > 0 {
		return nil, r.faults.errOrNil()
	}
	return out, nil
}

// resolve lays the tenant over its plan. known are the faults of the plans,
// which are not reported again for each tenant.
func (r *reader) resolve(file policyFile, tenant, path string, known map[string][]grant.Problem) (*grant.Policy, bool) {
	spec := file.Tenants[tenant]
	var plan *policySpec
	name := ""
	if spec.Plan != nil {
		name = *spec.Plan
		found, ok := file.Plans[name]
		if !ok {
			r.fault(r.nearestAt(join(path, "plan")), join(path, "plan"), quote(name)+" is no plan of this file",
				suggestion(name, slices.Collect(maps.Keys(file.Plans))))
			return nil, false
		}
		if spec.MadeFrom != nil {
			r.fault(r.nearestAt(join(path, "made_from")), join(path, "made_from"), "stands beside plan", "keep one: made_from only labels a policy that is written out in full")
			return nil, false
		}
		plan = &found
	}
	p := spec.policySpec.resolve(plan)
	if plan != nil {
		p.Plan = name
	}
	r.complete(path, spec.policySpec, plan)
	for _, found := range p.Validate() {
		if !slices.Contains(known[name], found) {
			r.reportAt(path, found)
		}
	}
	return p, true
}

// complete reports what neither the spec nor the plan under it gives. A zero in
// its place would refuse everything, or make a class free.
func (r *reader) complete(path string, s policySpec, plan *policySpec) {
	if plan == nil {
		plan = &policySpec{}
	}
	missing := func(at, what string, given bool) {
		if !given {
			r.fault(r.nearestAt(at), join(at, what), "is missing", "give it here or in the plan")
		}
	}
	missing(path, "rate", s.Rate != nil || plan.Rate != nil)
	missing(path, "burst", s.Burst != nil || plan.Burst != nil)
	missing(path, "classes", s.Classes != nil || plan.Classes != nil)
	for _, name := range slices.Sorted(maps.Keys(s.Classes)) {
		missing(join(join(path, "classes"), quoteKey(name)), "cost", s.Classes[name].Cost != nil || plan.Classes[name].Cost != nil)
	}
}

func (r *reader) reportAt(path string, found grant.Problem) {
	at := join(path, found.Field)
	r.fault(r.nearestAt(at), at, found.Given, "allowed: "+found.Allowed)
}

// resolve makes the policy of a spec laid over another one, which may be nil.
func (s policySpec) resolve(under *policySpec) *grant.Policy {
	if under == nil {
		under = &policySpec{}
	}
	p := &grant.Policy{}
	set(&p.Plan, nil, s.MadeFrom)
	set(&p.Mode, under.Mode, s.Mode)
	set(&p.Rate, under.Rate, s.Rate)
	set(&p.Burst, under.Burst, s.Burst)
	p.Grant = resolveSettings(under.Grant, s.Grant)
	if len(under.Classes)+len(s.Classes) > 0 {
		p.Classes = make(map[grant.RouteClass]grant.Class, len(under.Classes)+len(s.Classes))
	}
	for _, layer := range []map[string]classSpec{under.Classes, s.Classes} {
		for name, c := range layer {
			class := p.Classes[grant.RouteClass(name)]
			set(&class.Cost, nil, c.Cost)
			set(&class.Central, nil, c.Central)
			set(&class.Emergency, nil, c.Emergency)
			p.Classes[grant.RouteClass(name)] = class
		}
	}
	if under.Emergency != nil || s.Emergency != nil {
		var below, above emergencySpec
		set(&below, nil, under.Emergency)
		set(&above, nil, s.Emergency)
		p.Emergency = &grant.Emergency{Grant: resolveSettings(below.Grant, above.Grant)}
		set(&p.Emergency.Rate, below.Rate, above.Rate)
		set(&p.Emergency.Burst, below.Burst, above.Burst)
	}
	return p
}

func resolveSettings(under, over *settingsSpec) (g grant.GrantSettings) {
	for _, s := range []*settingsSpec{under, over} {
		if s != nil {
			set(&g.Quantum, nil, s.Quantum)
			set(&g.Owners, nil, s.Owners)
			set(&g.TTL, nil, s.TTL)
		}
	}
	return g
}

// set takes the last of the values that is given.
func set[T any](to *T, under, over *T) {
	if over == nil {
		over = under
	}
	if over != nil {
		*to = *over
	}
}

// PolicyYAML renders the policy in full, so that ParsePolicy reads the same
// policy back.
func PolicyYAML(p *grant.Policy) []byte { return render(policyNode(p)) }

// ParsePolicy reads one policy that is written out in full; name stands in the
// positions of faults.
func ParsePolicy(name string, raw []byte) (*grant.Policy, error) {
	root, err := parse(name, raw)
	if err != nil {
		return nil, err
	}
	r := newReader(name)
	if root == nil {
		r.fault(Position{Source: name}, "", "is empty", "write a policy: rate, burst and classes at least")
		return nil, r.faults.errOrNil()
	}
	var spec policySpec
	r.decode(root, reflect.ValueOf(&spec).Elem(), "", options{})
	if len(r.faults) > 0 {
		return nil, r.faults.errOrNil()
	}
	p := spec.resolve(nil)
	r.complete("", spec, nil)
	for _, found := range p.Validate() {
		r.reportAt("", found)
	}
	if len(r.faults) > 0 {
		return nil, r.faults.errOrNil()
	}
	return p, nil
}

// PoliciesYAML renders a policy file in which every tenant is written out in
// full, in order of tenant; ParsePolicies reads the same policies back. Tenants
// without a policy, deleted ones, are left out.
func PoliciesYAML(list []TenantPolicy) []byte {
	sorted := slices.SortedFunc(slices.Values(list), func(a, b TenantPolicy) int {
		return strings.Compare(string(a.Tenant), string(b.Tenant))
	})
	file, tenants := &yaml.Node{Kind: yaml.MappingNode}, &yaml.Node{Kind: yaml.MappingNode}
	if slices.ContainsFunc(list, func(t TenantPolicy) bool { return t.Strict }) {
		add(file, "strict", word("!!bool", "true"))
	}
	for _, t := range sorted {
		if t.Policy == nil {
			continue
		}
		add(tenants, string(t.Tenant), policyNode(t.Policy))
	}
	add(file, "tenants", tenants)
	return render(file)
}

func policyNode(p *grant.Policy) *yaml.Node {
	m := &yaml.Node{Kind: yaml.MappingNode}
	value := func(m *yaml.Node, key string, v any) { add(m, key, node(reflect.ValueOf(v), options{})) }
	settings := func(m *yaml.Node, g grant.GrantSettings) {
		if g == (grant.GrantSettings{}) {
			return
		}
		inner := &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
		value(inner, "quantum", g.Quantum)
		value(inner, "owners", g.Owners)
		value(inner, "ttl", g.TTL)
		add(m, "grant", inner)
	}
	if p.Plan != "" {
		value(m, "made_from", p.Plan)
	}
	value(m, "mode", p.Mode)
	value(m, "rate", p.Rate)
	value(m, "burst", p.Burst)
	settings(m, p.Grant)
	classes := &yaml.Node{Kind: yaml.MappingNode}
	if len(p.Classes) == 0 {
		classes.Style = yaml.FlowStyle
	}
	for _, name := range p.ClassNames() {
		c := p.Classes[name]
		if !c.Central && !c.Emergency {
			value(classes, string(name), c.Cost)
			continue
		}
		inner := &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
		value(inner, "cost", c.Cost)
		if c.Central {
			value(inner, "central", true)
		}
		if c.Emergency {
			value(inner, "emergency", true)
		}
		add(classes, string(name), inner)
	}
	add(m, "classes", classes)
	if e := p.Emergency; e != nil {
		inner := &yaml.Node{Kind: yaml.MappingNode}
		value(inner, "rate", e.Rate)
		value(inner, "burst", e.Burst)
		settings(inner, e.Grant)
		add(m, "emergency", inner)
	}
	return m
}
