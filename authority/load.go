package authority

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// load rebuilds a partition from its records. Ledger time goes on from the
// largest instant in any of them: it stood still while nobody led.
func load(cfg Config, p grant.Partition, s Store) (*Ledger, error) {
	l := newLedger(cfg, p)
	var late []func() error // what needs the policies first
	err := s.Load(p, func(k, v []byte) error {
		if len(k) == 0 {
			return fmt.Errorf("key is empty: %w", errCorrupt)
		}
		if err := l.loadRecord(k[0], string(k[1:]), v, &late); err != nil {
			return fmt.Errorf("record %q: %w", k, err)
		}
		return nil
	})
	for _, f := range late {
		if err != nil {
			break
		}
		err = f()
	}
	if err != nil {
		return nil, fmt.Errorf("load partition %d: %w", p, err)
	}
	l.now = l.persisted
	l.afterLoad()
	if err := l.Check(); err != nil {
		return nil, fmt.Errorf("load partition %d: %w", p, err)
	}
	return l, nil
}

func (l *Ledger) loadRecord(kind byte, name string, v []byte, late *[]func() error) error {
	seen := func(i grant.Instant) { l.persisted = max(l.persisted, i) }
	if kind == kindRecovery && len(v) == 8 && v[0] == 0 { // as recover wrote it; ours begins with its format
		l.recovered = &recovery{at: -1, noGrants: grant.Instant(binary.BigEndian.Uint64(v))}
		return nil
	}
	d := openValue(v)
	switch kind {
	case kindPolicy:
		t := &tenant{id: grant.TenantID(name), slot: -1, timer: grant.Never}
		t.version, t.deleted = d.uint(), d.bool()
		content := d.policy()
		if err := d.done(); err != nil {
			return err
		}
		if problems := content.Validate(); len(problems) > 0 {
			return fmt.Errorf("%w: %v", errCorrupt, problems[0])
		}
		t.policy = l.intern(content)
		t.ordinary.ceiling = content.Burst
		t.ordinary.bucket.level = content.Burst
		if e := content.Emergency; e != nil {
			t.reserve = &account{emergency: true, ceiling: e.Burst, bucket: bucket{level: e.Burst}}
		}
		l.tenants[t.id] = t
		return nil
	case kindBucket:
		b := bucket{level: d.units(), carry: d.int63(), last: d.instant()}
		ceiling := d.units()
		seen(b.last)
		*late = append(*late, func() error {
			t, a, err := l.loaded(name)
			if err != nil {
				return err
			}
			if a == nil {
				a = &account{emergency: true}
				t.reserve = a
			}
			a.bucket, a.ceiling, a.stored = b, ceiling, true
			l.buckets++
			return nil
		})
	case kindOwner:
		return l.loadOwner(name, d, seen, late)
	case kindDecision:
		if len(name) != 8 {
			return errCorrupt
		}
		stamp := grant.Instant(binary.BigEndian.Uint64([]byte(name)))
		id, at, attempts, err := decodeDecisions(v)
		if err != nil {
			return err
		}
		seen(at)
		l.stamp = max(l.stamp, stamp)
		*late = append(*late, func() error {
			t := l.tenants[id]
			if t == nil {
				return fmt.Errorf("decision of tenant %q without a policy: %w", id, errCorrupt)
			}
			batch := decidedBatch{at: at, stamp: stamp, t: t}
			for _, a := range attempts {
				l.decided[a.id] = decision{t, a.sum, a.cost}
				l.callerOf(a.id.Incarnation).live++
				batch.ids = append(batch.ids, a.id)
			}
			t.decisions += int32(len(attempts))
			l.window = append(l.window, batch)
			return nil
		})
		return nil
	case kindLow:
		var inc grant.Incarnation
		if len(name) != len(inc) {
			return errCorrupt
		}
		copy(inc[:], name)
		by := l.callerOf(inc)
		by.low, by.quiet = d.uint(), d.instant()
		seen(by.quiet)
	case kindMember:
		m := &member{holds: make(map[*account]*tenant)}
		if len(name) != len(m.id) {
			return errCorrupt
		}
		copy(m.id[:], name)
		m.state = MemberState(d.uint())
		m.owner = grant.Owner(d.text(grant.MaxOwnerLen))
		seen(d.instant())
		if !m.state.Final() || m.state > Fenced {
			return errCorrupt
		}
		if have := l.members[m.id]; have != nil { // an owner record came first
			have.state = m.state
			m = have
		}
		l.members[m.id] = m
	case kindTime:
		seen(d.instant())
	case kindVersion:
		l.versionFloor = d.uint()
	case kindRecovery:
		l.recovered = &recovery{at: d.instant(), noGrants: d.instant()}
		seen(l.recovered.at)
	default:
		return fmt.Errorf("kind %q is not known to this build", kind)
	}
	return d.done()
}

// loaded finds the tenant and bucket that a key without its kind names.
func (l *Ledger) loaded(name string) (*tenant, *account, error) {
	if len(name) < 2 || name[0] > 1 {
		return nil, nil, errCorrupt
	}
	t := l.tenants[grant.TenantID(name[1:])]
	if t == nil {
		return nil, nil, fmt.Errorf("tenant %q has no policy: %w", name[1:], errCorrupt)
	}
	return t, t.account(name[0] == 1), nil
}

func (l *Ledger) loadOwner(name string, d *decoder, seen func(grant.Instant), late *[]func() error) error {
	var inc grant.Incarnation
	if len(name) < 2+len(inc) {
		return errCorrupt
	}
	copy(inc[:], name[len(name)-len(inc):])
	where := name[:len(name)-len(inc)]
	name = d.text(grant.MaxOwnerLen)
	o := &owner{outstanding: d.units(), expiry: d.instant(), granted: d.instant()}
	o.last.id, o.last.result = grant.GrantID(d.uint()), grant.Granted
	copy(o.last.sum[:], d.bytes(len(o.last.sum)))
	o.last.units, o.last.ttl = d.units(), d.span()
	seen(o.granted)
	*late = append(*late, func() error {
		t, a, err := l.loaded(where)
		if err != nil {
			return err
		}
		if a == nil {
			// The bucket was full and is forgotten, the policy has none any more,
			// and the owner's last grant id is still kept. Nothing says how large
			// the bucket was: should a policy bring it back, it starts empty.
			a = &account{emergency: true}
			t.reserve = a
		}
		o.member = l.members[inc]
		if o.member == nil {
			o.member = &member{id: inc, owner: grant.Owner(name), holds: make(map[*account]*tenant)}
			l.members[inc] = o.member
		}
		o.member.holds[a] = t
		if a.hot == nil {
			a.hot = &hot{owners: make(map[grant.Incarnation]*owner), nextExpiry: grant.Never}
		}
		a.hot.owners[inc] = o
		l.owners++
		a.hot.outstanding += o.outstanding
		l.out += o.outstanding
		if o.outstanding > 0 {
			a.hot.nextExpiry = min(a.hot.nextExpiry, o.expiry)
		}
		return nil
	})
	return d.done()
}

func (l *Ledger) callerOf(inc grant.Incarnation) *caller {
	by := l.callers[inc]
	if by == nil {
		by = new(caller)
		l.callers[inc] = by
	}
	return by
}

// afterLoad restarts what is not in records, and carries out a recovery: every
// level is 0, and no grants for the longest ttl, since nobody knows what was
// spent and handed out by the store that is gone.
func (l *Ledger) afterLoad() {
	for inc, by := range l.callers {
		if by.live == 0 {
			l.idle = append(l.idle, idleCaller{by.quiet, inc})
		}
	}
	sortIdle(l.idle)
	if len(l.members) > 0 {
		l.confirmBy = l.now.Add(confirmIn)
	}
	for inc, m := range l.members {
		if m.state.Final() {
			l.gone = append(l.gone, goneMember{l.now, inc})
		}
	}
	sortGone(l.gone)
	fresh := l.recovered != nil && l.recovered.at < 0
	if fresh {
		l.recovered = &recovery{at: l.now, noGrants: l.now.Add(l.cfg.GrantLife(time.Duration(l.recovered.noGrants)))}
		e := newValue(24)
		e.instant(l.recovered.at)
		e.instant(l.recovered.noGrants)
		l.records = append(l.records, Record{key(kindRecovery), e})
	}
	for _, id := range l.sortedTenants() {
		t := l.tenants[id]
		for a := range t.accounts {
			if fresh {
				a.bucket = bucket{last: l.now}
				l.touch(t, a)
			} else if !a.stored {
				a.bucket.last = l.now
			}
		}
		l.arm(t)
	}
}
