package authority

import (
	"maps"
	"slices"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// finalMemory is how long a partition remembers that an incarnation is final.
// The registry of incarnations remembers longer and registers it no more.
const finalMemory = 10 * time.Minute

// confirmIn is how long after a load the registry has to name the incarnations
// that hold something. Until then none is taken for lost: the last grant id is
// kept as long as the incarnation is registered.
const confirmIn = time.Minute

type goneMember struct {
	at  grant.Instant
	inc grant.Incarnation
}

// memberChanged follows the registry. Live and Lost come and go and decide
// nothing; the final states stay.
func (l *Ledger) memberChanged(c Caller, ev *Member) {
	m := l.members[ev.Incarnation]
	switch {
	case m == nil && ev.State == Lost:
		// Nothing is known of it and nothing can be held.
		l.memberReply(c, ev.Incarnation, Lost)
		return
	case m == nil:
		m = &member{id: ev.Incarnation, owner: ev.Owner, holds: make(map[*account]*tenant)}
		l.members[ev.Incarnation] = m
	case m.state.Final() && ev.State != Fenced && ev.State != Discarded || m.state == ev.State:
		l.memberReply(c, ev.Incarnation, m.state)
		return
	}
	if m.owner == "" {
		m.owner = ev.Owner
	}
	if m.state != Fenced { // a fenced one may still give its room back
		m.state = ev.State
	}
	if m.state.Final() {
		l.records = append(l.records, Record{key(kindMember, m.id[:]), encodeMember(m, l.now)})
		l.gone = append(l.gone, goneMember{l.now, m.id})
	}
	if m.state > Live {
		l.leave(m, ev.State == Discarded)
	}
	l.memberReply(c, ev.Incarnation, m.state)
}

func (l *Ledger) memberReply(c Caller, inc grant.Incarnation, s MemberState) {
	if c != nil {
		l.replies = append(l.replies, Reply{Caller: c, Member: &MemberResult{Incarnation: inc, State: s}})
	}
}

// leave deals with what a member holds when it is not live any more. Only a
// discard frees room: the wallet was closed before it was sent.
func (l *Ledger) leave(m *member, discarded bool) {
	held := slices.SortedFunc(maps.Keys(m.holds), func(a, b *account) int {
		s, t := m.holds[a].id, m.holds[b].id
		switch {
		case s < t || s == t && !a.emergency && b.emergency:
			return -1
		}
		return 1
	})
	for _, a := range held {
		t := m.holds[a]
		l.settle(t, a)
		o := a.hot.owners[m.id]
		if o == nil { // settling found that it holds nothing
			l.arm(t)
			continue
		}
		if m.state.Final() && o.open != nil {
			l.unpark(t, a, o.open, refused(finalReason(m.state)))
		}
		if discarded {
			l.stats.Discarded += o.outstanding
			a.hot.discarded += o.outstanding
			l.setOutstanding(a.hot, o, 0)
		}
		l.releaseIfGone(t, a, m.id)
		l.serve(t, a)
		l.arm(t)
	}
	if m.state == Lost && len(m.holds) == 0 {
		delete(l.members, m.id)
	}
}

// confirmMembers takes for lost whoever the registry did not name after a load.
func (l *Ledger) confirmMembers() {
	if l.confirmBy == 0 || l.now < l.confirmBy {
		return
	}
	l.confirmBy = 0
	unnamed := make([]grant.Incarnation, 0, len(l.members))
	for inc, m := range l.members {
		if m.state < Live {
			unnamed = append(unnamed, inc)
		}
	}
	slices.SortFunc(unnamed, compareIncarnations)
	for _, inc := range unnamed {
		m := l.members[inc]
		m.state = Lost
		l.leave(m, false)
	}
}

// forgetMembers drops final members that hold nothing, oldest first.
func (l *Ledger) forgetMembers() {
	n := 0
	for n < len(l.gone) && l.gone[n].at.Add(finalMemory) <= l.now {
		g := l.gone[n]
		n++
		m := l.members[g.inc]
		if m == nil {
			continue
		}
		if len(m.holds) > 0 { // a zombie counts until its units expire
			l.gone = append(l.gone, goneMember{l.now, g.inc})
			continue
		}
		delete(l.members, g.inc)
		l.records = append(l.records, Record{Key: key(kindMember, g.inc[:])})
	}
	if n > 0 {
		l.gone = l.gone[n:]
	}
}
