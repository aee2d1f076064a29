package grant

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"
)

// Reason says why, in answers to callers, bodies, metrics and the last refusals.
type Reason uint8

const (
	None             Reason = iota
	Over                    // over the tenant's rate: the bucket has too little
	CostExceedsBurst        // dearer than the burst: can never be admitted
	NoRoom                  // N*q is taken by other owners: use Check
	Overloaded              // a bounded queue is full; the centre is alive
	Unavailable             // the centre did not decide; ask again
	Deadline                // the request's time ran out before it was decided
	ClockDistrust           // a clock moved in a way that cannot be trusted
	UnknownTenant           // no policy
	UnknownRoute            // the policy has no such route class
	UnknownSession          // incarnation not registered here: open a session again
	Conflict                // the same id with other parameters
	Stale                   // an older id than the last one, or a Check after its window
	Fenced                  // an operator fenced the incarnation
	Discarded               // the incarnation closed its wallet
	Superseded              // a newer process bears the owner's name
	HeldExceeds             // held is more than the ledger's record: drop the wallet, ask with held 0
	Invalid                 // a field out of range
	VersionConflict         // PutPolicy expected another version
	numReasons
)

// NumReasons is the size of an array indexed by Reason.
const NumReasons = int(numReasons)

var reasonNames = [numReasons]string{
	"", "rate", "cost-exceeds-burst", "no-slot", "overloaded", "unavailable", "deadline", "clock",
	"unknown-tenant", "unknown-route", "unknown-session", "conflict", "stale", "fenced", "discarded",
	"superseded", "held-exceeds-record", "invalid", "version-conflict",
}

func (r Reason) String() string {
	if r < numReasons {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Reasons lists every reason but None, for the pre-created children of metrics.
func Reasons() []Reason {
	all := make([]Reason, 0, numReasons-1)
	for r := None + 1; r < numReasons; r++ {
		all = append(all, r)
	}
	return all
}

// Fingerprint covers the parameters of a request, so that the same id with
// other parameters is told from a retry: the first 128 bits of a SHA-256 over
// an injective encoding (every string behind its length).
type Fingerprint [16]byte

// GrantRequest asks for units for one incarnation. A retry is the same bytes:
// everything but Age and KnownVersion is covered by Sum.
type GrantRequest struct {
	Tenant      TenantID
	Incarnation Incarnation
	Emergency   bool // from the emergency bucket
	ID          GrantID
	Want        Units // most units asked for, >= Min
	// Min is what the oldest waiter lacks (its price less Held), at least 1.
	Min  Units
	Held Units // balance of the wallet when the request was first sent
	Sum  Fingerprint

	Age          time.Duration // since the request was first sent; not covered by Sum
	KnownVersion uint64        // of the policy copy that the agent has; not covered
}

// Fingerprint computes what Sum must be.
func (r *GrantRequest) Fingerprint() Fingerprint {
	var buf [512]byte
	b := append(buf[:0], 'g', boolByte(r.Emergency))
	b = append(b, r.Incarnation[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(r.ID))
	b = binary.BigEndian.AppendUint64(b, uint64(r.Want))
	b = binary.BigEndian.AppendUint64(b, uint64(r.Min))
	b = binary.BigEndian.AppendUint64(b, uint64(r.Held))
	b = binary.AppendUvarint(b, uint64(len(r.Tenant)))
	b = append(b, r.Tenant...)
	return sum(b)
}

// GrantResult is the kind of a GrantAnswer.
type GrantResult uint8

const (
	// Granted: Units were durably deducted; balance and expiry are renewed.
	Granted GrantResult = iota + 1
	// Empty: nothing now; closes the id. Reason NoRoom asks the agent to use
	// Check and to ask again after a quarter of the ttl.
	Empty
	// Refused: the request itself is wrong or comes from an incarnation that
	// gets no grants; closes the id.
	Refused
	// Parked: the request waits for refill; Wait is the estimate. Not final.
	Parked
	// Busy: Reason says Overloaded, Unavailable or UnknownSession; nothing is
	// known about the request's fate. It does not close the id: send the same
	// bytes again.
	Busy
)

var grantResultNames = [...]string{"none", "granted", "empty", "refused", "parked", "busy"}

func (r GrantResult) String() string {
	if int(r) < len(grantResultNames) {
		return grantResultNames[r]
	}
	return fmt.Sprintf("result(%d)", uint8(r))
}

// Closes reports whether the answer ends its grant id.
func (r GrantResult) Closes() bool { return r == Granted || r == Empty || r == Refused }

// GrantAnswer answers a GrantRequest.
type GrantAnswer struct {
	Tenant      TenantID
	Incarnation Incarnation
	Emergency   bool
	ID          GrantID
	Result      GrantResult
	Reason      Reason
	Units       Units         // of Granted
	TTL         time.Duration // of Granted: the agent counts it from its first sending
	Wait        time.Duration // of Parked: estimate of the time to service
	Policy      PolicyCopy
}

// PolicyCopy comes with answers: the agent may price requests by it for
// PolicyCopyLife after it arrived.
type PolicyCopy struct {
	Version uint64  // zero: no copy
	Policy  *Policy // nil: the version that the request named is current
}

// PolicyCopyLife is how long an agent may go on without hearing of a policy.
const PolicyCopyLife = 10 * time.Second

// CheckRequest asks the authority to decide one request.
type CheckRequest struct {
	Tenant  TenantID
	Class   RouteClass
	Count   Units // operations, 0 to MaxUnits; zero asks without spending
	Attempt Attempt
	Sum     Fingerprint

	Budget       time.Duration // time left to decide; zero or less: none left. Not covered by Sum
	KnownVersion uint64        // not covered by Sum
}

// Fingerprint computes what Sum must be.
func (r *CheckRequest) Fingerprint() Fingerprint {
	var buf [512]byte
	b := append(buf[:0], 'c')
	b = append(b, r.Attempt.Incarnation[:]...)
	b = binary.BigEndian.AppendUint64(b, r.Attempt.Seq)
	b = binary.BigEndian.AppendUint64(b, uint64(r.Count))
	b = binary.AppendUvarint(b, uint64(len(r.Class)))
	b = append(b, r.Class...)
	b = append(b, r.Tenant...)
	return sum(b)
}

// Verdict is the outcome of a Check.
type Verdict uint8

const (
	// Allow: the cost was durably deducted; forward exactly once.
	Allow Verdict = iota + 1
	// Deny: nothing was deducted. Reason Over carries RetryAfter; the others
	// (CostExceedsBurst, UnknownTenant, UnknownRoute) never succeed as they are.
	Deny
	// Reject: the request itself is wrong: Conflict, Stale, Fenced, Invalid.
	Reject
	// Undecided: Overloaded, Unavailable or Deadline; nothing is known about
	// an earlier sending of the same attempt.
	Undecided
)

var verdictNames = [...]string{"none", "allow", "deny", "reject", "undecided"}

func (v Verdict) String() string {
	if int(v) < len(verdictNames) {
		return verdictNames[v]
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// CheckAnswer answers a CheckRequest.
type CheckAnswer struct {
	Tenant  TenantID
	Attempt Attempt
	Verdict Verdict
	Reason  Reason
	Cost    Units
	// RetryAfter spreads clients over the refill of what waits before them;
	// zero: never or not known.
	RetryAfter time.Duration
	// Affordable is when the bucket could pay this cost if nobody else asked;
	// a denial may be remembered that long, and at most one second.
	Affordable time.Duration
	Replayed   bool // the attempt had been allowed before
	Shadow     bool // Allow by mode shadow or off; the verdict would have been Deny if Reason is set
	Remaining  Units
	Policy     PolicyCopy
}

func boolByte(b bool) byte {
	if b {
		return 1
	}
	return 0
}

func sum(b []byte) Fingerprint {
	h := sha256.Sum256(b)
	return Fingerprint(h[:16])
}
