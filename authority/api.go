package authority

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Config holds the constants of a Node. One value serves all partitions.
type Config struct {
	// RhoPPB bounds the rate error of monotonic clocks, in parts per billion:
	// 0 to 10,000,000 (1 %).
	RhoPPB int64 `yaml:"rho_ppb" help:"bound on the rate error of clocks, parts per billion"`
	// Tolerance for steps between an agent's clocks, 0 to 1 s; the authority
	// waits that much longer than an agent before it takes units for expired.
	Tolerance time.Duration `yaml:"tolerance" help:"tolerance for steps between an agent's clocks"`
	// DedupWindow is how long an allowed Check is remembered in ledger time.
	// It must exceed the longest time in which a caller repeats an attempt.
	DedupWindow time.Duration `yaml:"dedup_window" help:"how long an allowed Check is remembered"`
	// PersistTimeEvery bounds how much ledger time a crash may lose while a
	// bucket is not full. At most 5 s.
	PersistTimeEvery time.Duration `yaml:"persist_time_every" help:"most ledger time that a crash loses"`
	// MaxInbox is how many calls wait for a step; one tenant holds at most a
	// fair share of them. MaxBatch is how many one step takes.
	MaxInbox int `yaml:"max_inbox" help:"calls that wait for a step, in each partition"`
	MaxBatch int `yaml:"max_batch" help:"calls that one step takes"`
	// MaxParked is how many grant requests wait for refill in one partition.
	MaxParked int `yaml:"max_parked" help:"grant requests that wait for refill, in each partition"`
	// MaxTenants bounds the policies of one partition, deleted ones included.
	MaxTenants int `yaml:"max_tenants" help:"policies of each partition, deleted ones included"`
	// MaxCallers bounds the incarnations whose Checks one partition remembers.
	// Beyond it only registered incarnations get allowances.
	MaxCallers int `yaml:"max_callers" help:"incarnations whose Checks each partition remembers"`
	// RoundTrip is a round trip plus a commit, as assumed by the warnings about
	// policies that cannot keep the promise of 97 %.
	RoundTrip time.Duration `yaml:"round_trip" help:"round trip plus commit that warnings about policies assume"`
}

// DefaultConfig is what the daemon starts from.
func DefaultConfig() Config {
	return Config{
		RhoPPB:           1_000_000, // 0.1 %: NTP slews by at most 0.05 %
		Tolerance:        100 * time.Millisecond,
		DedupWindow:      10 * time.Second,
		PersistTimeEvery: 5 * time.Second,
		MaxInbox:         4096,
		MaxBatch:         1024,
		MaxParked:        4096,
		MaxTenants:       1 << 20,
		MaxCallers:       1 << 16,
		RoundTrip:        5 * time.Millisecond,
	}
}

// Validate names every field out of range.
func (c Config) Validate() error {
	number := func(field string, given, low, high int64) error {
		if given < low || given > high {
			return fmt.Errorf("%s: %d; allowed: %d to %d", field, given, low, high)
		}
		return nil
	}
	span := func(field string, given, low, high time.Duration) error {
		if given < low || given > high {
			return fmt.Errorf("%s: %v; allowed: %v to %v", field, given, low, high)
		}
		return nil
	}
	return errors.Join(
		number("rho_ppb", c.RhoPPB, 0, 10_000_000),
		span("tolerance", c.Tolerance, 0, time.Second),
		span("dedup_window", c.DedupWindow, time.Second, time.Hour),
		span("persist_time_every", c.PersistTimeEvery, time.Millisecond, 5*time.Second),
		number("max_inbox", int64(c.MaxInbox), 1, 1<<20),
		number("max_batch", int64(c.MaxBatch), 1, 1<<16),
		number("max_parked", int64(c.MaxParked), 1, 1<<20),
		number("max_tenants", int64(c.MaxTenants), 1, 1<<24),
		number("max_callers", int64(c.MaxCallers), 1, 1<<24),
		span("round_trip", c.RoundTrip, 0, time.Minute),
	)
}

// GrantLife is how long the authority takes units of a grant for unspent, in
// ledger time from the step that decided: ttl*(1+2*rho)/(1-rho) + tolerance,
// rounded up, so that the agent, which counts ttl by its own clock from its
// first sending, always stops first.
func (c Config) GrantLife(ttl time.Duration) time.Duration {
	const billion = 1_000_000_000
	hi, lo := bits.Mul64(uint64(ttl), uint64(billion+2*c.RhoPPB))
	life, _ := bits.Div64(hi, lo, uint64(billion-c.RhoPPB)) // ttl <= 24 h and rho <= 1 %: fits
	return time.Duration(life) + 1 + c.Tolerance
}

// Reading is one look at the machine's clocks, both monotonic. Ledger time
// advances by the smaller of the two differences.
type Reading struct {
	Mono grant.Instant // CLOCK_MONOTONIC
	Raw  grant.Instant // CLOCK_MONOTONIC_RAW
}

// Caller is whatever the shell needs to route a reply; the machine hands it
// back untouched. A nil Caller wants no reply.
type Caller any

// Call is one input of a Node: exactly one of the pointers is set.
type Call struct {
	Caller Caller
	// Deadline in the shell's monotonic time (Reading.Mono); a call stepped
	// later is answered undecided and deducts nothing. Zero: none.
	Deadline grant.Instant

	Grant  *grant.GrantRequest
	Check  *grant.CheckRequest
	Put    *PutPolicy
	Get    *GetTenant
	List   *ListPolicies
	Member *Member
}

// Reply is one output of a Node, released only when every record stepped
// before it is durable. Exactly one of the pointers is set.
type Reply struct {
	Caller Caller

	Grant  *grant.GrantAnswer // Parked is not final: another reply to the same Caller follows
	Check  *grant.CheckAnswer
	Put    *PutResult
	Tenant *TenantState
	List   *PolicyPage
	Member *MemberResult
	Push   *PolicyPush // unasked; Caller is nil
}

// PutPolicy sets the policy of one tenant, or deletes it.
type PutPolicy struct {
	Tenant     grant.TenantID
	Policy     *grant.Policy // nil: delete
	Expected   uint64        // version the caller has seen; 0: none yet
	AnyVersion bool
}

// PutResult is the outcome of PutPolicy.
type PutResult struct {
	Tenant    grant.TenantID
	Version   uint64          // in force now
	Reason    grant.Reason    // None, VersionConflict, Invalid, UnknownTenant, Overloaded or Unavailable
	Problems  []grant.Problem // of Invalid
	Warnings  []string
	Unchanged bool
}

// GetTenant asks for the state of one tenant.
type GetTenant struct{ Tenant grant.TenantID }

// ListPolicies asks for a page of policies of one partition in order of tenant.
type ListPolicies struct {
	After grant.TenantID // exclusive
	Limit int            // 1 to 1000
}

// PolicyPage answers ListPolicies. Reason is None or Unavailable.
type PolicyPage struct {
	Reason   grant.Reason
	Policies []VersionedPolicy
	More     bool
}

// VersionedPolicy is a tenant's policy as the ledger has it.
type VersionedPolicy struct {
	Tenant  grant.TenantID
	Version uint64
	Policy  *grant.Policy
	Deleted bool
}

// PolicyPush tells an incarnation that holds units of a tenant of a change.
type PolicyPush struct {
	Incarnation grant.Incarnation
	VersionedPolicy
}

// MemberState is what is known of an incarnation.
type MemberState uint8

const (
	// Live: registered under a lease.
	Live MemberState = iota + 1
	// Lost: its lease ended. For people and metrics; frees and refuses nothing.
	Lost
	// Superseded: a newer process of the same name registered. No more grants; final.
	Superseded
	// Discarded: it closed its wallets. Its room is free at once; final.
	Discarded
	// Fenced by an operator: no grants and no checks; final.
	Fenced
)

var memberStateNames = [...]string{"unknown", "live", "lost", "superseded", "discarded", "fenced"}

func (s MemberState) String() string {
	if int(s) < len(memberStateNames) {
		return memberStateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Final reports whether the incarnation gets no more grants, ever. A superseded
// or fenced one may still give its room back by a discard.
func (s MemberState) Final() bool { return s >= Superseded }

// Member tells a partition what became of an incarnation. Every partition is
// told of every change, and after a load of every member that is not gone.
type Member struct {
	Incarnation grant.Incarnation
	Owner       grant.Owner
	State       MemberState
}

// MemberResult answers Member. Reason is None or Unavailable.
type MemberResult struct {
	Incarnation grant.Incarnation
	State       MemberState // after the step
	Reason      grant.Reason
}

// TenantState is the inspection of one tenant.
type TenantState struct {
	VersionedPolicy
	Reason        grant.Reason // None, UnknownTenant or Unavailable
	Partition     grant.Partition
	Ordinary      AccountState
	Emergency     *AccountState // nil without an emergency budget
	LastRefusals  []Refusal     // newest first
	LiveDecisions int
}

// AccountState is one bucket and what is handed out of it.
type AccountState struct {
	Level       grant.Units
	Burst       grant.Units
	Outstanding grant.Units
	Slack       grant.Units // N*q in force
	CheckCredit grant.Units
	Owners      []OwnerState  // in order of owner, incarnation
	Parked      []ParkedState // in order of service
	Granted     grant.Units   // these four since the partition was loaded
	Checked     grant.Units
	Expired     grant.Units
	Discarded   grant.Units
}

// OwnerState is what one incarnation must be taken to hold.
type OwnerState struct {
	Owner       grant.Owner
	Incarnation grant.Incarnation
	State       MemberState
	Outstanding grant.Units
	ExpiresIn   time.Duration
	LastGrant   grant.GrantID
}

// ParkedState is one waiting grant request.
type ParkedState struct {
	Owner       grant.Owner
	Incarnation grant.Incarnation
	ID          grant.GrantID
	Min, Want   grant.Units
	Waited      time.Duration
	Estimate    time.Duration
}

// Refusal is one of a tenant's last refusals, for people.
type Refusal struct {
	Ago    time.Duration
	Path   string // "check" or "grant"
	Reason grant.Reason
	Cost   grant.Units
	Class  grant.RouteClass
	Owner  grant.Owner
}

// Record is one change of the store: a nil Value deletes the key. Keys are
// unique within a partition; the partition itself is not part of the key.
type Record struct {
	Key, Value []byte
}

// Store keeps the records of all partitions. Methods are safe for concurrent
// use by different partitions; one partition makes one call at a time.
//
// The conformance suite in package storetest says exactly what is asked of it.
type Store interface {
	// Load yields every record of the partition in order of key, as of some
	// moment after all commits that were acknowledged. The slices are the
	// callee's and valid only during the call.
	Load(p grant.Partition, yield func(key, value []byte) error) error
	// Commit makes all records durable, all or none, before it returns nil.
	// After any error the outcome is unknown: the records may appear later.
	Commit(p grant.Partition, records []Record) error
}

// Stats counts since the partition was loaded; gauges are of the last step.
type Stats struct {
	Grants    [6]uint64 // by grant.GrantResult
	GrantsBy  [grant.NumReasons]uint64
	Checks    [5]uint64 // by grant.Verdict
	ChecksBy  [grant.NumReasons]uint64
	Replays   uint64 // grants and checks answered from memory
	Granted   grant.Units
	Checked   grant.Units
	Expired   grant.Units
	Discarded grant.Units
	Denied    grant.Units // asked for by denied Checks

	Tenants     int
	Buckets     int // not full, or not yet forgotten
	Owners      int
	Outstanding grant.Units
	Parked      int
	Decisions   int
	Inbox       int
	Now         grant.Instant // ledger time
}
