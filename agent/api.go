package agent

import (
	"fmt"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Reading is one look at the process's clocks: both values of one time.Now().
// Wall time is compared only with itself, to notice that the machine slept or
// that a clock stepped.
type Reading struct {
	Mono grant.Instant // CLOCK_MONOTONIC
	Wall grant.Instant // nanoseconds since 1970
}

// Config holds the constants of the machines of one agent.
type Config struct {
	// Tolerance is the largest move of Wall minus Mono since a request was
	// first sent that leaves its units trusted.
	Tolerance time.Duration
	// Deadline is the longest a request waits for units or for a Check.
	Deadline time.Duration
	// HotPerSecond: more requests than this in the last second make a tenant
	// hot; fewer for one ttl make it cold.
	HotPerSecond int
	// MaxWaiters bounds the requests of one tenant that wait at once, for
	// units and for Checks together.
	MaxWaiters int
	// NextSeq numbers Check attempts; one sequence per incarnation.
	NextSeq func() uint64
}

// Ask is one request to be decided.
type Ask struct {
	Ticket uint64 // chosen by the caller, unique among the tenant's waiting requests
	Class  grant.RouteClass
	Count  grant.Units   // operations; zero looks without spending
	Budget time.Duration // time the caller has; the smaller of it and Config.Deadline counts
}

// Outcome is the kind of a Decision. The three ways not to admit must never be
// confused.
type Outcome uint8

const (
	// Waiting: not decided yet; the ticket is resolved later.
	Waiting Outcome = iota
	// Admitted: forward exactly once.
	Admitted
	// Denied: the tenant is over its limit, or the cost can never be paid (HTTP 429).
	Denied
	// Undecided: nothing was heard in time, a queue is full or a clock is not
	// trusted (HTTP 503).
	Undecided
	// Rejected: the request itself is not known here: tenant or route (HTTP 403/404).
	Rejected
)

var outcomeNames = [...]string{"waiting", "admitted", "denied", "undecided", "rejected"}

func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// Path is where a decision was made.
type Path uint8

const (
	Local        Path = iota // from the wallet, or from what the agent remembers
	Central                  // by a Check at the authority
	FromReserve              // from emergency grants, after loss of the centre
	Unrestricted             // mode off
)

var pathNames = [...]string{"local", "central", "emergency", "off"}

func (p Path) String() string {
	if int(p) < len(pathNames) {
		return pathNames[p]
	}
	return fmt.Sprintf("path(%d)", uint8(p))
}

// Decision is the answer to an Ask.
type Decision struct {
	Outcome    Outcome
	Reason     grant.Reason // why not, or in mode shadow what would have been the reason
	Path       Path
	Shadow     bool // admitted only because the mode is shadow or off
	Cost       grant.Units
	RetryAfter time.Duration // zero: none (it can never succeed, or nothing is known)
	Remaining  grant.Units   // what this gateway holds after a local decision, or the level after a central one
	// At is when the decision counts: the reading that Take compared with the
	// expiry; for a Check the arrival of its answer (its ledger step is earlier).
	At grant.Instant
	// Start is when the attempt began.
	Start   grant.Instant
	Policy  *grant.Policy // nil when not known here
	Version uint64
}

// Resolution ends the wait of a ticket.
type Resolution struct {
	Ticket   uint64
	Decision Decision
}

// Effects are what a Tenant wants done, in order. The shell sends the requests
// in one batch with those of other tenants, and wakes the waiters.
type Effects struct {
	Grants   []grant.GrantRequest
	Checks   []grant.CheckRequest
	Resolved []Resolution
}

// Drop says why units in a wallet became unusable.
type Drop uint8

const (
	DropExpired  Drop = iota // the ttl ran out
	DropClock                // a clock stepped or the machine slept
	DropRefused              // the authority knows of fewer units than are held
	DropReplaced             // an answer that no longer fits: late, closed or for another id
	DropClosed               // discarded at drain
	NumDrops
)

var dropNames = [NumDrops]string{"expired", "clock", "refused", "late", "discarded"}

func (d Drop) String() string {
	if d < NumDrops {
		return dropNames[d]
	}
	return fmt.Sprintf("drop(%d)", uint8(d))
}

// Stats counts since the Tenant was made; gauges are of the call.
type Stats struct {
	Granted  grant.Units // credited to the wallets
	Spent    grant.Units // taken from the wallets
	Held     grant.Units
	Dropped  [NumDrops]grant.Units
	Requests uint64 // grant requests, retries not counted
	Retries  uint64
	Checks   uint64
	Ignored  uint64 // answers that were not for the open id
	Waiting  int
	Hot      bool
}
