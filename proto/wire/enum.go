package wire

import (
	"fmt"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// The tables say which plain value has which wire value. They are written out,
// although the numbers agree today, because the wire values may never change
// while the plain ones may be reordered.

var reasonToWire = [...]stipendv1.Reason{
	grant.None:             stipendv1.Reason_REASON_UNSPECIFIED,
	grant.Over:             stipendv1.Reason_REASON_RATE,
	grant.CostExceedsBurst: stipendv1.Reason_REASON_COST_EXCEEDS_BURST,
	grant.NoRoom:           stipendv1.Reason_REASON_NO_SLOT,
	grant.Overloaded:       stipendv1.Reason_REASON_OVERLOADED,
	grant.Unavailable:      stipendv1.Reason_REASON_UNAVAILABLE,
	grant.Deadline:         stipendv1.Reason_REASON_DEADLINE,
	grant.ClockDistrust:    stipendv1.Reason_REASON_CLOCK,
	grant.UnknownTenant:    stipendv1.Reason_REASON_UNKNOWN_TENANT,
	grant.UnknownRoute:     stipendv1.Reason_REASON_UNKNOWN_ROUTE,
	grant.UnknownSession:   stipendv1.Reason_REASON_UNKNOWN_SESSION,
	grant.Conflict:         stipendv1.Reason_REASON_CONFLICT,
	grant.Stale:            stipendv1.Reason_REASON_STALE,
	grant.Fenced:           stipendv1.Reason_REASON_FENCED,
	grant.Discarded:        stipendv1.Reason_REASON_DISCARDED,
	grant.Superseded:       stipendv1.Reason_REASON_SUPERSEDED,
	grant.HeldExceeds:      stipendv1.Reason_REASON_HELD_EXCEEDS_RECORD,
	grant.Invalid:          stipendv1.Reason_REASON_INVALID,
	grant.VersionConflict:  stipendv1.Reason_REASON_VERSION_CONFLICT,
}

var resultToWire = [...]stipendv1.GrantResult{
	0:             stipendv1.GrantResult_GRANT_RESULT_UNSPECIFIED,
	grant.Granted: stipendv1.GrantResult_GRANT_RESULT_GRANTED,
	grant.Empty:   stipendv1.GrantResult_GRANT_RESULT_EMPTY,
	grant.Refused: stipendv1.GrantResult_GRANT_RESULT_REFUSED,
	grant.Parked:  stipendv1.GrantResult_GRANT_RESULT_PARKED,
	grant.Busy:    stipendv1.GrantResult_GRANT_RESULT_BUSY,
}

var verdictToWire = [...]stipendv1.Verdict{
	0:               stipendv1.Verdict_VERDICT_UNSPECIFIED,
	grant.Allow:     stipendv1.Verdict_VERDICT_ALLOW,
	grant.Deny:      stipendv1.Verdict_VERDICT_DENY,
	grant.Reject:    stipendv1.Verdict_VERDICT_REJECT,
	grant.Undecided: stipendv1.Verdict_VERDICT_UNDECIDED,
}

var modeToWire = [...]stipendv1.Mode{
	grant.Enforce: stipendv1.Mode_MODE_ENFORCE,
	grant.Shadow:  stipendv1.Mode_MODE_SHADOW,
	grant.Off:     stipendv1.Mode_MODE_OFF,
}

var (
	reasonFromWire  = invert[grant.Reason](reasonToWire[:])
	resultFromWire  = invert[grant.GrantResult](resultToWire[:])
	verdictFromWire = invert[grant.Verdict](verdictToWire[:])
	modeFromWire    = invert[grant.Mode](modeToWire[:])
)

// none marks a wire value without a plain one.
const none = 0xff

// invert makes the table of the other direction. It panics when two plain
// values share a wire value.
func invert[P ~uint8, W ~int32](to []W) []P {
	var from []P
	for p, w := range to {
		for int(w) >= len(from) {
			from = append(from, none)
		}
		if from[w] != none {
			panic(fmt.Sprintf("wire: %d stands for both %d and %d", w, from[w], p))
		}
		from[w] = P(p)
	}
	return from
}

func toEnum[P ~uint8, W ~int32](table []W, p P) W {
	if int(p) < len(table) {
		return table[p]
	}
	return 0 // unspecified; the other side refuses it where a value is needed
}

func fromEnum[P ~uint8, W ~int32](table []P, w W) (P, bool) {
	if w < 0 || int(w) >= len(table) || table[w] == none {
		return 0, false
	}
	return table[w], true
}

// ToReason is the wire value of the reason.
func ToReason(r grant.Reason) stipendv1.Reason { return toEnum(reasonToWire[:], r) }

// FromReason refuses values that this build does not know.
func FromReason(w stipendv1.Reason) (grant.Reason, error) {
	r, ok := fromEnum(reasonFromWire, w)
	if !ok {
		return 0, problem("reason", w, "a value of stipend.v1.Reason that this version knows")
	}
	return r, nil
}

// ToGrantResult is the wire value of the result.
func ToGrantResult(r grant.GrantResult) stipendv1.GrantResult { return toEnum(resultToWire[:], r) }

// FromGrantResult refuses unspecified and values that this build does not know.
func FromGrantResult(w stipendv1.GrantResult) (grant.GrantResult, error) {
	r, ok := fromEnum(resultFromWire, w)
	if !ok || r == 0 {
		return 0, problem("result", w, "granted, empty, refused, parked or busy")
	}
	return r, nil
}

// ToVerdict is the wire value of the verdict.
func ToVerdict(v grant.Verdict) stipendv1.Verdict { return toEnum(verdictToWire[:], v) }

// FromVerdict refuses unspecified and values that this build does not know.
func FromVerdict(w stipendv1.Verdict) (grant.Verdict, error) {
	v, ok := fromEnum(verdictFromWire, w)
	if !ok || v == 0 {
		return 0, problem("verdict", w, "allow, deny, reject or undecided")
	}
	return v, nil
}

// ToMode is the wire value of the mode.
func ToMode(m grant.Mode) stipendv1.Mode { return toEnum(modeToWire[:], m) }

// FromMode refuses values that this build does not know. Unspecified is
// Enforce: a forgotten mode is the strict one.
func FromMode(w stipendv1.Mode) (grant.Mode, error) {
	if w == stipendv1.Mode_MODE_UNSPECIFIED {
		return grant.Enforce, nil
	}
	m, ok := fromEnum(modeFromWire, w)
	if !ok {
		return 0, problem("mode", w, "enforce, shadow or off")
	}
	return m, nil
}
