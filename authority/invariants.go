package authority

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stipend/stipend/proto/grant"
)

// Check tests the invariants listed at Ledger and names the first that is
// broken. It scans everything: for tests, simulated events and loads.
func (l *Ledger) Check() error {
	var owners, parked, buckets int
	var out grant.Units
	decisions := make(map[*tenant]int32)
	live := make(map[grant.Incarnation]int)
	total := 0
	for i, b := range l.window {
		if i > 0 && (b.at < l.window[i-1].at || b.stamp <= l.window[i-1].stamp) {
			return fmt.Errorf("invariant 6: batch %d of the window is out of order", i)
		}
		for _, id := range b.ids {
			d, ok := l.decided[id]
			if !ok || d.t != b.t {
				return fmt.Errorf("invariant 6: attempt %v in the window is not indexed", id)
			}
			decisions[b.t]++
			live[id.Incarnation]++
			total++
		}
	}
	if total != len(l.decided) {
		return fmt.Errorf("invariant 6: %d attempts in the window, %d in the index", total, len(l.decided))
	}
	for inc, by := range l.callers {
		if by.live != live[inc] {
			return fmt.Errorf("invariant 7: caller %v has %d live attempts, counted %d", inc, by.live, live[inc])
		}
	}
	for _, id := range l.sortedTenants() {
		t := l.tenants[id]
		if t.decisions != decisions[t] {
			return fmt.Errorf("invariant 7: tenant %q has %d decisions, counted %d", id, t.decisions, decisions[t])
		}
		due := grant.Never
		for a := range t.accounts {
			if err := l.checkAccount(t, a); err != nil {
				return fmt.Errorf("tenant %q, emergency %v: %w", id, a.emergency, err)
			}
			if a.stored {
				buckets++
			}
			if h := a.hot; h != nil {
				owners += len(h.owners)
				parked += len(h.parked)
				out += h.outstanding
				due = min(due, h.nextExpiry)
				for _, p := range h.parked {
					due = min(due, p.ends)
				}
			}
		}
		if due < grant.Never && (t.slot < 0 || t.timer > max(due, l.now+1)) {
			return fmt.Errorf("invariant 8: tenant %q is due at %d, its timer says %d", id, due, t.timer)
		}
	}
	for i, t := range l.timers {
		if int(t.slot) != i || l.tenants[t.id] != t {
			return fmt.Errorf("invariant 8: slot %d of the timer heap holds %q at %d", i, t.id, t.slot)
		}
	}
	if owners != l.owners || parked != l.parked || buckets != l.buckets || out != l.out {
		return fmt.Errorf("invariant 7: owners %d, parked %d, buckets %d, outstanding %d; counted %d, %d, %d, %d",
			l.owners, l.parked, l.buckets, l.out, owners, parked, buckets, out)
	}
	for inc, m := range l.members {
		for a, t := range m.holds {
			if a.hot == nil || a.hot.owners[inc] == nil || l.tenants[t.id] != t {
				return fmt.Errorf("invariant 7: member %v holds an account of %q that does not know it", inc, t.id)
			}
		}
	}
	return nil
}

func (l *Ledger) checkAccount(t *tenant, a *account) error {
	b, set := &a.bucket, l.settings(t, a)
	switch {
	case b.last > l.now:
		return fmt.Errorf("invariant 1: refilled at %d, now is %d", b.last, l.now)
	case b.level < 0 || b.level > set.Burst:
		return fmt.Errorf("invariant 2: level %d, burst %d", b.level, set.Burst)
	case b.carry < 0 || !set.Rate.Zero() && b.carry >= int64(set.Rate.Per):
		return fmt.Errorf("invariant 2: carry %d of a rate of %v", b.carry, set.Rate)
	case !a.stored && b.level != set.Burst:
		return fmt.Errorf("invariant 2: level %d of %d without a record", b.level, set.Burst)
	}
	h := a.hot
	if h == nil {
		return nil
	}
	var sum grant.Units
	open := 0
	for inc, o := range h.owners {
		sum += o.outstanding
		switch {
		case o.outstanding < 0, o.outstanding > 0 && o.expiry < h.nextExpiry:
			return fmt.Errorf("invariant 3: owner %v has %d outstanding until %d, next expiry %d", inc, o.outstanding, o.expiry, h.nextExpiry)
		case o.member == nil || o.member.holds[a] != t || l.members[inc] != o.member:
			return fmt.Errorf("invariant 7: owner %v is not held by its member", inc)
		case o.open == nil:
		case o.open.req.ID <= o.last.id:
			return fmt.Errorf("invariant 4: owner %v waits with id %d, closed was %d", inc, o.open.req.ID, o.last.id)
		case !slices.Contains(h.parked, o.open):
			return fmt.Errorf("invariant 4: the request of owner %v is not parked", inc)
		default:
			open++
		}
	}
	switch {
	case sum != h.outstanding:
		return fmt.Errorf("invariant 3: outstanding %d, counted %d", h.outstanding, sum)
	case open != len(h.parked):
		return fmt.Errorf("invariant 4: %d parked, %d owners wait", len(h.parked), open)
	case h.credit < 0 || h.credit > b.level || h.checksUntil == 0 && h.credit != 0:
		return fmt.Errorf("invariant 5: credit %d, level %d, %d parked", h.credit, b.level, len(h.parked))
	}
	return nil
}

func sortIdle(s []idleCaller) {
	slices.SortFunc(s, func(a, b idleCaller) int {
		return cmp.Or(cmp.Compare(a.at, b.at), compareIncarnations(a.inc, b.inc))
	})
}

func sortGone(s []goneMember) {
	slices.SortFunc(s, func(a, b goneMember) int {
		return cmp.Or(cmp.Compare(a.at, b.at), compareIncarnations(a.inc, b.inc))
	})
}
