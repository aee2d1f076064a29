package link

import (
	"sync"
	"time"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// firstWindow is the number of entries that may be in flight before the first
// answer after a reconnect.
const firstWindow = 32

type queuedGrant struct {
	r  grant.GrantRequest
	at time.Time
}

type queuedCheck struct {
	r  grant.CheckRequest
	at time.Time
}

// queue holds what waits for sending and how much may be in flight.
//
// Invariants:
//
//  1. len(grants) and len(checks) are at most limit.
//  2. Both are empty while up is false.
//  3. While slow is true, inflight is at most window, and until an answer has
//     come at most one batch was sent.
type queue struct {
	limit int
	wake  chan struct{} // holds one token when there may be something to send

	mu       sync.Mutex
	up       bool
	grants   []queuedGrant
	checks   []queuedCheck
	maxBatch int

	slow     bool
	window   int
	inflight int // entries sent and not answered; kept only while slow
	batches  int
	answered int
	since    time.Time // first sending after the last receipt; zero: nothing is awaited
}

// reset opens the queue for a new stream, in slow start.
func (q *queue) reset(maxBatch int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.up, q.maxBatch = true, maxBatch
	q.slow, q.window, q.inflight, q.batches, q.answered = true, firstWindow, 0, 0, 0
	q.since = time.Time{}
}

// shut closes the queue and forgets what waits.
func (q *queue) shut() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.up = false
	clear(q.grants)
	clear(q.checks)
	q.grants, q.checks = q.grants[:0], q.checks[:0]
}

func (q *queue) putGrant(r *grant.GrantRequest) grant.Reason {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case !q.up:
		return grant.Unavailable
	case len(q.grants) >= q.limit:
		return grant.Overloaded
	}
	q.grants = append(q.grants, queuedGrant{*r, time.Now()})
	q.rouse()
	return grant.None
}

func (q *queue) putCheck(r *grant.CheckRequest) grant.Reason {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case !q.up:
		return grant.Unavailable
	case len(q.checks) >= q.limit:
		return grant.Overloaded
	}
	q.checks = append(q.checks, queuedCheck{*r, time.Now()})
	q.rouse()
	return grant.None
}

func (q *queue) rouse() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// next takes the next batch, or nil when nothing may be sent now. Grants go
// first but leave half of a batch to Checks that wait. A Check whose budget ran
// out here is left out: its caller has given up on it by now.
func (q *queue) next(now time.Time) *stipendv1.AgentBatch {
	q.mu.Lock()
	defer q.mu.Unlock()
	room := q.maxBatch
	if q.slow {
		if q.batches > 0 && q.answered == 0 {
			return nil
		}
		room = min(room, q.window-q.inflight)
	}
	if room <= 0 || len(q.grants)+len(q.checks) == 0 {
		return nil
	}
	b := &stipendv1.AgentBatch{}
	take := min(len(q.grants), max(room-len(q.checks), (room+1)/2))
	if take > 0 {
		b.Grants = make([]*stipendv1.GrantRequest, 0, take)
	}
	for i := range q.grants[:take] {
		g := &q.grants[i]
		g.r.Age += now.Sub(g.at)
		b.Grants = append(b.Grants, wire.ToGrantRequest(&g.r))
	}
	q.grants = dropFront(q.grants, take)

	room -= take
	seen := 0
	for i := range q.checks {
		if len(b.Checks) == room {
			break
		}
		seen++
		c := &q.checks[i]
		c.r.Budget -= now.Sub(c.at)
		if c.r.Budget <= 0 {
			continue
		}
		b.Checks = append(b.Checks, wire.ToCheckRequest(&c.r))
	}
	q.checks = dropFront(q.checks, seen)

	n := len(b.Grants) + len(b.Checks)
	if n == 0 {
		return nil
	}
	q.batches++
	if q.slow {
		q.inflight += n
	}
	if q.since.IsZero() {
		q.since = now
	}
	return b
}

// dropFront removes the first n entries and keeps the storage, so that a
// steady flow allocates nothing.
func dropFront[T any](s []T, n int) []T {
	rest := copy(s, s[n:])
	clear(s[rest:])
	return s[:rest]
}

// heard notes a frame with n answers in it.
func (q *queue) heard(now time.Time, n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.since = time.Time{}
	q.answered += n
	if !q.slow {
		return
	}
	q.inflight = max(0, q.inflight-n)
	q.window += n
	if q.window >= 4*q.maxBatch {
		q.slow = false
	} else if q.inflight > 0 {
		// Entries that are never answered would keep the window shut for ever
		// if a heard frame stopped the clock of silence.
		q.since = now
	}
	if n > 0 {
		q.rouse()
	}
}

// silent is how long something has been awaited in vain.
func (q *queue) silent(now time.Time) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.since.IsZero() {
		return 0
	}
	return now.Sub(q.since)
}

// depth is the number of entries that wait for sending.
func (q *queue) depth() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.grants) + len(q.checks)
}
