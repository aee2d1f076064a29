package authority

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// The kinds of records, the first byte of a key. Keys and values are encodings
// of which no two inputs share an output: every string stands behind its length
// or at the end.
const (
	kindBucket   = 'B' // account byte, tenant -> bucket; absent: full
	kindDecision = 'D' // stamp (8 bytes, unique, rising) -> tenant and its allowed attempts
	kindLow      = 'L' // incarnation -> low-water mark of its attempts
	kindMember   = 'M' // incarnation -> final state
	kindOwner    = 'O' // account byte, tenant, incarnation -> last grant and what is outstanding
	kindPolicy   = 'P' // tenant -> policy and version
	kindRecovery = 'R' // written by recover: nanoseconds without grants; see Ledger.recover
	kindTime     = 'T' // -> ledger time
	kindVersion  = 'V' // -> largest version of any forgotten policy
)

// recordFormat is the first byte of every value, so that a later version can
// tell an old record from its own.
const recordFormat = 1

var errCorrupt = errors.New("record is corrupt")

func key(kind byte, parts ...[]byte) []byte {
	n := 1
	for _, p := range parts {
		n += len(p)
	}
	k := make([]byte, 1, n)
	k[0] = kind
	for _, p := range parts {
		k = append(k, p...)
	}
	return k
}

func bucketKey(t grant.TenantID, emergency bool) []byte {
	k := make([]byte, 0, 2+len(t))
	k = append(k, kindBucket, boolByte(emergency))
	return append(k, t...)
}

func ownerKey(t grant.TenantID, emergency bool, inc grant.Incarnation) []byte {
	k := make([]byte, 0, 2+len(t)+len(inc))
	k = append(k, kindOwner, boolByte(emergency))
	k = append(k, t...)
	return append(k, inc[:]...) // fixed length at the end: injective
}

func decisionKey(stamp grant.Instant) []byte {
	return binary.BigEndian.AppendUint64([]byte{kindDecision}, uint64(stamp))
}

func boolByte(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// encoder appends fields; decoder reads them back and remembers the first fault.
type encoder []byte

func newValue(size int) encoder { return append(make(encoder, 0, size), recordFormat) }

func (e *encoder) uint(v uint64)           { *e = binary.AppendUvarint(*e, v) }
func (e *encoder) units(u grant.Units)     { e.uint(uint64(u)) }
func (e *encoder) instant(i grant.Instant) { e.uint(uint64(i)) }
func (e *encoder) bool(b bool)             { *e = append(*e, boolByte(b)) }
func (e *encoder) bytes(b []byte)          { *e = append(*e, b...) }
func (e *encoder) text(s string)           { e.uint(uint64(len(s))); *e = append(*e, s...) }

type decoder struct {
	rest []byte
	err  error
}

func openValue(v []byte) *decoder {
	d := &decoder{rest: v}
	if f := d.byte(); d.err == nil && f != recordFormat {
		d.err = fmt.Errorf("record has format %d; this build reads %d", f, recordFormat)
	}
	return d
}

func (d *decoder) fail() {
	if d.err == nil {
		d.err = errCorrupt
	}
	d.rest = nil
}

func (d *decoder) byte() byte {
	if len(d.rest) == 0 {
		d.fail()
		return 0
	}
	b := d.rest[0]
	d.rest = d.rest[1:]
	return b
}

func (d *decoder) bool() bool {
	b := d.byte()
	if b > 1 {
		d.fail()
	}
	return b == 1
}

func (d *decoder) uint() uint64 {
	v, n := binary.Uvarint(d.rest)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.rest = d.rest[n:]
	return v
}

// int63 is a uint that must fit a non-negative int64.
func (d *decoder) int63() int64 {
	v := d.uint()
	if v > uint64(grant.MaxUnits) {
		d.fail()
		return 0
	}
	return int64(v)
}

func (d *decoder) units() grant.Units     { return grant.Units(d.int63()) }
func (d *decoder) instant() grant.Instant { return grant.Instant(d.int63()) }
func (d *decoder) span() time.Duration    { return time.Duration(d.int63()) }

func (d *decoder) bytes(n int) []byte {
	if n < 0 || len(d.rest) < n {
		d.fail()
		return make([]byte, max(n, 0))
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) text(limit int) string {
	n := d.uint()
	if n > uint64(limit) {
		d.fail()
		return ""
	}
	return string(d.bytes(int(n)))
}

func (d *decoder) incarnation() (inc grant.Incarnation) {
	copy(inc[:], d.bytes(len(inc)))
	return inc
}

func (d *decoder) done() error {
	if d.err == nil && len(d.rest) > 0 {
		d.err = errCorrupt
	}
	return d.err
}

func (e *encoder) account(r grant.Rate, burst grant.Units, g grant.GrantSettings) {
	e.units(r.Units)
	e.uint(uint64(r.Per))
	e.units(burst)
	e.units(g.Quantum)
	e.uint(uint64(g.Owners))
	e.uint(uint64(g.TTL))
}

func (d *decoder) account() (r grant.Rate, burst grant.Units, g grant.GrantSettings) {
	r = grant.Rate{Units: d.units(), Per: d.span()}
	burst = d.units()
	g = grant.GrantSettings{Quantum: d.units(), Owners: int(d.int63()), TTL: d.span()}
	return r, burst, g
}

// appendPolicy is the canonical form of a policy's content: equal policies have
// equal bytes.
func appendPolicy(e *encoder, p *grant.Policy) {
	e.text(p.Plan)
	e.account(p.Rate, p.Burst, p.Grant)
	e.uint(uint64(p.Mode))
	e.bool(p.Emergency != nil)
	if p.Emergency != nil {
		e.account(p.Emergency.Rate, p.Emergency.Burst, p.Emergency.Grant)
	}
	names := p.ClassNames()
	e.uint(uint64(len(names)))
	for _, name := range names {
		c := p.Classes[name]
		e.text(string(name))
		e.units(c.Cost)
		e.bool(c.Central)
		e.bool(c.Emergency)
	}
}

func (d *decoder) policy() *grant.Policy {
	p := &grant.Policy{Plan: d.text(grant.MaxClassLen)}
	p.Rate, p.Burst, p.Grant = d.account()
	if mode := d.uint(); mode > uint64(grant.Off) {
		d.fail()
	} else {
		p.Mode = grant.Mode(mode)
	}
	if d.bool() {
		p.Emergency = new(grant.Emergency)
		p.Emergency.Rate, p.Emergency.Burst, p.Emergency.Grant = d.account()
	}
	n := d.uint()
	if n > grant.MaxClasses {
		d.fail()
		return p
	}
	p.Classes = make(map[grant.RouteClass]grant.Class, n)
	for range n {
		name := grant.RouteClass(d.text(grant.MaxClassLen))
		p.Classes[name] = grant.Class{Cost: d.units(), Central: d.bool(), Emergency: d.bool()}
	}
	if d.err == nil && uint64(len(p.Classes)) != n {
		d.fail()
	}
	return p
}

func encodePolicy(t *tenant) []byte {
	e := newValue(96)
	e.uint(t.version)
	e.bool(t.deleted)
	appendPolicy(&e, t.policy.Policy)
	return e
}

func encodeBucket(b *bucket, ceiling grant.Units) []byte {
	e := newValue(40)
	e.units(b.level)
	e.uint(uint64(b.carry))
	e.instant(b.last)
	e.units(ceiling)
	return e
}

func encodeOwner(o *owner) []byte {
	e := newValue(96)
	e.text(string(o.member.owner))
	e.units(o.outstanding)
	e.instant(o.expiry)
	e.instant(o.granted)
	e.uint(uint64(o.last.id))
	e.bytes(o.last.sum[:])
	e.units(o.last.units)
	e.uint(uint64(o.last.ttl))
	return e
}

func encodeMember(m *member, at grant.Instant) []byte {
	e := newValue(32)
	e.uint(uint64(m.state))
	e.text(string(m.owner))
	e.instant(at)
	return e
}

func encodeLow(low uint64, at grant.Instant) []byte {
	e := newValue(24)
	e.uint(low)
	e.instant(at)
	return e
}

// encodeDecisions holds the attempts of one tenant that one step allowed, in
// runs of one incarnation.
func encodeDecisions(t grant.TenantID, at grant.Instant, fresh []attempt) []byte {
	e := newValue(32 + len(t) + 32*len(fresh))
	e.text(string(t))
	e.instant(at)
	for len(fresh) > 0 {
		inc, run := fresh[0].id.Incarnation, 1
		for run < len(fresh) && fresh[run].id.Incarnation == inc {
			run++
		}
		e.bytes(inc[:])
		e.uint(uint64(run))
		for _, a := range fresh[:run] {
			e.uint(a.id.Seq)
			e.bytes(a.sum[:])
			e.units(a.cost)
		}
		fresh = fresh[run:]
	}
	return e
}

func decodeDecisions(v []byte) (t grant.TenantID, at grant.Instant, out []attempt, err error) {
	d := openValue(v)
	t = grant.TenantID(d.text(grant.MaxTenantLen))
	at = d.instant()
	for d.err == nil && len(d.rest) > 0 {
		inc := d.incarnation()
		n := d.uint()
		if n == 0 || n > uint64(len(d.rest)) {
			d.fail()
			break
		}
		for range n {
			a := attempt{id: grant.Attempt{Incarnation: inc, Seq: d.uint()}}
			copy(a.sum[:], d.bytes(len(a.sum)))
			a.cost = d.units()
			out = append(out, a)
		}
	}
	return t, at, out, d.done()
}
