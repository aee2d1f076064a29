package sim

import (
	"math/rand/v2"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Registry stands for etcd and what the authority keeps there: incarnations
// under leases, and final states that never change again. It outlives the
// center's process, which hears of changes in order, a little late.
type Registry struct {
	w       *World
	rng     *rand.Rand
	members map[grant.Incarnation]*registered
	order   []*registered // by first registration
	told    grant.Instant // when the newest change arrives at the center
}

type registered struct {
	authority.Member
	streams int
	lost    grant.Instant // the last instant at which it was lost
	detach  uint64        // counts, so that an old lease's end is told from a new one's
}

func newRegistry(w *World) *Registry {
	return &Registry{w: w, rng: w.source("registry"), members: make(map[grant.Incarnation]*registered)}
}

func (r *Registry) delay() time.Duration {
	return time.Millisecond + time.Duration(r.rng.Int64N(int64(4*time.Millisecond)))
}

// register makes an incarnation live, unless its state is final, and supersedes
// older ones of the same name.
func (r *Registry) register(inc grant.Incarnation, owner grant.Owner) authority.MemberState {
	m := r.members[inc]
	if m == nil {
		m = &registered{Member: authority.Member{Incarnation: inc, Owner: owner}}
		r.members[inc] = m
		r.order = append(r.order, m)
		for _, other := range r.order {
			if other != m && other.Owner == owner {
				r.set(other, authority.Superseded)
			}
		}
	}
	r.set(m, authority.Live)
	return m.State
}

func (r *Registry) set(m *registered, s authority.MemberState) {
	if m.State == s || m.State.Final() && (s != authority.Fenced && s != authority.Discarded || m.State == authority.Fenced) {
		return
	}
	if s == authority.Lost || m.State == authority.Lost {
		m.lost = r.w.now
	}
	m.State = s
	r.w.note("registry %s %v", m.Owner, s)
	ev := m.Member
	r.told = max(r.told, r.w.now.Add(r.delay()))
	r.w.At(r.told, func() { r.w.Center.do(0, func() { r.w.Center.changed(ev) }) })
}

// attach and detach keep the lease of an incarnation.
func (r *Registry) attach(inc grant.Incarnation) {
	if m := r.members[inc]; m != nil {
		m.streams++
	}
}

func (r *Registry) detach(inc grant.Incarnation) {
	m := r.members[inc]
	if m == nil {
		return
	}
	m.streams--
	m.detach++
	n := m.detach
	r.w.After(r.w.cfg.LeaseTTL, func() {
		if m.streams == 0 && m.detach == n {
			r.set(m, authority.Lost)
		}
	})
}

// orphan is the end of all streams with the center's process.
func (r *Registry) orphan() {
	for _, m := range r.order {
		if m.streams > 0 {
			m.streams = 1
			r.detach(m.Incarnation)
		}
	}
}

// Hiccup lets an incarnation's lease run out though its stream lives; it is
// registered again after d.
func (r *Registry) Hiccup(inc grant.Incarnation, d time.Duration) {
	m := r.members[inc]
	if m == nil || m.State != authority.Live {
		return
	}
	r.set(m, authority.Lost)
	r.w.After(d, func() {
		if m.streams > 0 {
			r.set(m, authority.Live)
		}
	})
}

// Fence ends an incarnation for good.
func (r *Registry) Fence(inc grant.Incarnation) {
	if m := r.members[inc]; m != nil {
		r.set(m, authority.Fenced)
	}
}

// discard is what a clean shutdown asks for.
func (r *Registry) discard(inc grant.Incarnation) {
	if m := r.members[inc]; m != nil {
		r.set(m, authority.Discarded)
	}
}

// State is what the registry says of an incarnation; zero: nothing.
func (r *Registry) State(inc grant.Incarnation) authority.MemberState {
	if m := r.members[inc]; m != nil {
		return m.State
	}
	return 0
}
