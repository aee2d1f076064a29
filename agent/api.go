package agent

import (
	"errors"
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

// Config holds the constants of the machines of one agent. One value serves
// all tenants.
type Config struct {
	// Tolerance is the largest move of Wall minus Mono since a request was
	// first sent that leaves its units trusted. 0 to 1 s.
	Tolerance time.Duration
	// Deadline is the longest a request waits for units or for a Check. 1 ms to 1 min.
	Deadline time.Duration
	// HotPerSecond: more requests than this in the last second make a tenant
	// hot; fewer for one ttl make it cold. 0 to 1,000,000.
	HotPerSecond int
	// MaxWaiters bounds the requests of one tenant that wait at once, for
	// units and for Checks together. 1 to 1,048,576.
	MaxWaiters int
	// LostAfter is how long nothing must have been heard from the authority,
	// with the link down, before emergency grants may be spent. 0 to 1 h.
	LostAfter time.Duration
	// RetryFirst and RetryMost bound the backoff before the same request is
	// sent again after it went unanswered or the authority was busy: drawn
	// evenly from zero to a ceiling that doubles from the first to the most.
	// 1 ms to 1 min, RetryFirst <= RetryMost.
	RetryFirst, RetryMost time.Duration
	// NextSeq numbers Check attempts; one sequence per incarnation, from 1.
	// Safe for use by all tenants at once.
	NextSeq func() uint64
	// Rand draws evenly from 0 to n-1, n >= 1: the jitter of retries. Safe for
	// use by all tenants at once.
	Rand func(n int64) int64
}

// DefaultConfig is what the daemon starts from; NextSeq and Rand are the
// caller's to set.
func DefaultConfig() Config {
	return Config{
		Tolerance:    100 * time.Millisecond,
		Deadline:     50 * time.Millisecond,
		HotPerSecond: 2,
		MaxWaiters:   1024,
		LostAfter:    3 * time.Second,
		RetryFirst:   50 * time.Millisecond,
		RetryMost:    time.Second,
	}
}

// Validate names every field out of range, what was given and what is allowed.
func (c Config) Validate() error {
	between := func(field string, given, low, high time.Duration) error {
		if given < low || given > high {
			return fmt.Errorf("%s: %v; allowed: %v to %v", field, given, low, high)
		}
		return nil
	}
	count := func(field string, given, low, high int) error {
		if given < low || given > high {
			return fmt.Errorf("%s: %d; allowed: %d to %d", field, given, low, high)
		}
		return nil
	}
	set := func(field string, ok bool) error {
		if !ok {
			return fmt.Errorf("%s: is nil; it must be set", field)
		}
		return nil
	}
	return errors.Join(
		between("tolerance", c.Tolerance, 0, time.Second),
		between("deadline", c.Deadline, time.Millisecond, time.Minute),
		count("hot_per_second", c.HotPerSecond, 0, 1_000_000),
		count("max_waiters", c.MaxWaiters, 1, 1<<20),
		between("lost_after", c.LostAfter, 0, time.Hour),
		between("retry_first", c.RetryFirst, time.Millisecond, time.Minute),
		between("retry_most", c.RetryMost, c.RetryFirst, time.Minute),
		set("next_seq", c.NextSeq != nil),
		set("rand", c.Rand != nil),
	)
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

// AccountStats counts the units of one account since the Tenant was made.
// Granted = Spent + Held + the sum of Dropped.
type AccountStats struct {
	Granted  grant.Units // in answers to an open request, in time or not
	Spent    grant.Units
	Held     grant.Units // now
	Dropped  [NumDrops]grant.Units
	Requests uint64 // grant requests, retries not counted
	Retries  uint64
}

// Stats counts since the Tenant was made; gauges are of the call.
type Stats struct {
	AccountStats // the ordinary account

	Reserve AccountStats // the emergency account
	Checks  uint64       // attempts, repeats not counted
	Ignored uint64       // answers that were not for an open request
	Waiting int          // requests that wait for units or for a Check
	Hot     bool
}
