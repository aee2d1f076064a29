// Package wire converts between the generated messages of package stipendv1
// and the plain types of package grant, in both directions. It is the only
// place where both are known.
//
// The To functions take values that are valid and never fail; each message
// comes out of one allocation together with its durations and byte strings, and
// shares no memory with what it was made from, but for strings. The From
// functions take what a stranger sent: they test sizes, ranges, enums,
// identifiers and fingerprints, and return an error of type Problems that names
// each faulty field, what was given and what is allowed. Nothing of a faulty
// message is returned.
//
// Messages of a link leave the incarnation out: it is the stream's, and the
// caller passes it in.
package wire

import (
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
)

// Problems is the error of every From function: at least one fault.
type Problems []grant.Problem

func (p Problems) Error() string {
	var b strings.Builder
	for i, one := range p {
		if i > 0 {
			b.WriteString("\n")
		}
		b.WriteString(one.Error())
	}
	return b.String()
}

func problem(field string, given any, allowed string) error {
	return Problems{{Field: field, Given: fmt.Sprint(given), Allowed: allowed}}
}

// missing is the error of a message that is absent where one must be.
func missing(field string) error { return problem(field, "nothing", "a message") }

// maxSeconds is how many whole seconds a time.Duration certainly holds.
const maxSeconds = math.MaxInt64 / int64(time.Second)

const durationAllowed = "a duration of 0 to 292 years"

// fromDuration reads a duration that may be absent (zero) but not negative,
// and refuses what time.Duration cannot hold instead of saturating it.
func fromDuration(field string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	s, n := d.GetSeconds(), d.GetNanos()
	if s < 0 || n < 0 || s > maxSeconds || n >= int32(time.Second) {
		return 0, problem(field, fmt.Sprintf("%d s and %d ns", s, n), durationAllowed)
	}
	total := s*int64(time.Second) + int64(n)
	if total < 0 { // the last second of the range
		return 0, problem(field, fmt.Sprintf("%d s and %d ns", s, n), durationAllowed)
	}
	return time.Duration(total), nil
}

// setDuration fills box, which lies beside its message, and returns it.
func setDuration(box *durationpb.Duration, d time.Duration) *durationpb.Duration {
	box.Seconds, box.Nanos = int64(d/time.Second), int32(d%time.Second)
	return box
}

// optional is setDuration for a field that is absent when zero or less.
func optional(box *durationpb.Duration, d time.Duration) *durationpb.Duration {
	if d <= 0 {
		return nil
	}
	return setDuration(box, d)
}

func fromUnits(field string, u int64, low, high grant.Units) (grant.Units, error) {
	if grant.Units(u) < low || grant.Units(u) > high {
		return 0, problem(field, u, fmt.Sprintf("%d to %d units", low, high))
	}
	return grant.Units(u), nil
}

// shorten keeps errors short whatever a stranger sends.
func shorten(s string) string {
	if len(s) > 80 {
		return fmt.Sprintf("%d bytes beginning with %q", len(s), s[:64])
	}
	return fmt.Sprintf("%q", s)
}

func fromTenant(s string) (grant.TenantID, error) {
	t := grant.TenantID(s)
	if t.Validate() != nil {
		return "", problem("tenant", shorten(s), fmt.Sprintf("1 to %d bytes of UTF-8 without control characters", grant.MaxTenantLen))
	}
	return t, nil
}

// FromOwner reads the name of a gateway.
func FromOwner(s string) (grant.Owner, error) {
	o := grant.Owner(s)
	if o.Validate() != nil {
		return "", problem("owner", shorten(s), fmt.Sprintf("1 to %d bytes of UTF-8 without control characters", grant.MaxOwnerLen))
	}
	return o, nil
}

const classAllowed = "1 to 64 letters, digits, '-', '_' and '.'"

func fromClass(field, s string) (grant.RouteClass, error) {
	c := grant.RouteClass(s)
	if c.Validate() != nil {
		return "", problem(field, shorten(s), classAllowed)
	}
	return c, nil
}

// FromIncarnation reads the 16 bytes of an incarnation, which are not all zero.
func FromIncarnation(b []byte) (grant.Incarnation, error) {
	if len(b) != len(grant.Incarnation{}) {
		return grant.Incarnation{}, problem("incarnation", fmt.Sprintf("%d bytes", len(b)), "16 random bytes")
	}
	i := grant.Incarnation(b)
	if i == (grant.Incarnation{}) {
		return i, problem("incarnation", "16 zero bytes", "16 random bytes")
	}
	return i, nil
}

// testSum compares the fingerprint that came with a request to the one that
// its parameters have: a retry with other parameters under a copied fingerprint
// would otherwise be taken for the same request and answered without payment.
func testSum(sent []byte, computed grant.Fingerprint) error {
	if len(sent) != len(computed) {
		return problem("fingerprint", fmt.Sprintf("%d bytes", len(sent)), fmt.Sprintf("%d bytes", len(computed)))
	}
	if grant.Fingerprint(sent) != computed {
		return problem("fingerprint", fmt.Sprintf("%x", sent), fmt.Sprintf("%x, the hash of these parameters", computed))
	}
	return nil
}
