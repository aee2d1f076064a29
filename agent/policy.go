package agent

import (
	"slices"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// view is what Take needs of the policy, made once per version.
type view struct {
	policy  *grant.Policy
	version uint64
	wallet  *Wallet
	classes []pricedClass // few: a scan beats a map
}

type pricedClass struct {
	name grant.RouteClass
	grant.Class
}

// scanned is how many classes are scanned before the map is asked.
const scanned = 8

func newView(p *grant.Policy, version uint64, w *Wallet) *view {
	v := &view{policy: p, version: version, wallet: w}
	for _, name := range p.ClassNames()[:min(len(p.Classes), scanned)] {
		v.classes = append(v.classes, pricedClass{name, p.Classes[name]})
	}
	return v
}

func (v *view) class(name grant.RouteClass) (grant.Class, bool) {
	for i := range v.classes {
		if v.classes[i].name == name {
			return v.classes[i].Class, true
		}
	}
	if len(v.policy.Classes) <= scanned {
		return grant.Class{}, false
	}
	c, ok := v.policy.Classes[name]
	return c, ok
}

// live is the policy if the copy may still be used at now, or nil.
func (t *Tenant) live(now Reading) *grant.Policy {
	if t.policy == nil || int64(now.Mono) >= t.until.Load() {
		return nil
	}
	return t.policy
}

// known is the version that requests name: the authority then leaves out the
// body.
func (t *Tenant) known() uint64 {
	if t.policy == nil {
		return 0
	}
	return t.version
}

// learn takes the policy copy of an answer.
func (t *Tenant) learn(now Reading, c grant.PolicyCopy, fx *Effects) {
	switch {
	case c.Version == 0:
	case c.Version == t.version && t.policy != nil:
		t.until.Store(int64(now.Mono.Add(grant.PolicyCopyLife)))
	case c.Policy != nil:
		t.adopt(now, c.Version, c.Policy, fx)
	}
}

// adopt makes p (nil: deleted) the policy, unless it is older than the copy in
// use: answers overtake each other. A copy that ran out yields to any version.
// What was concluded under the old policy is forgotten, and everybody who waits
// is placed anew.
func (t *Tenant) adopt(now Reading, version uint64, p *grant.Policy, fx *Effects) {
	if version < t.version && t.live(now) != nil {
		return
	}
	t.policy, t.version = p, version
	if p == nil {
		t.until.Store(0)
	} else {
		t.until.Store(int64(now.Mono.Add(grant.PolicyCopyLife)))
	}
	t.denied, t.backlog, t.lastOver = denial{}, backlog{}, longAgo
	for _, a := range t.accounts() {
		a.estimate, a.noRoom, a.notBefore = 0, 0, 0
	}
	t.publish(now)
	t.reroute(now, fx)
}

// publish lets Take see, or no longer see, the wallet and its prices: only of a
// hot tenant that may get grants, or in mode off.
func (t *Tenant) publish(now Reading) {
	p := t.live(now)
	old := t.view.Load()
	if p == nil || p.Mode != grant.Off && !(t.heat.hot && p.Grant.Enabled()) {
		if old != nil {
			t.view.Store(nil)
		}
		return
	}
	if old == nil || old.policy != p || old.version != t.version {
		t.view.Store(newView(p, t.version, &t.ordinary().wallet))
	}
}

// ttl is the life of ordinary grants under the last known policy; zero when
// nothing is known.
func (t *Tenant) ttl() time.Duration {
	if t.policy == nil {
		return 0
	}
	return t.policy.Grant.TTL
}

// hasReserve reports whether emergency grants are to be held: the policy has
// them and a class that may spend them.
func hasReserve(p *grant.Policy) bool {
	if p == nil || p.Emergency == nil || !p.Emergency.Grant.Enabled() {
		return false
	}
	return slices.ContainsFunc(p.ClassNames(), func(n grant.RouteClass) bool { return p.Classes[n].Emergency })
}
