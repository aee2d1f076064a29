package authority

import "github.com/stipend/stipend/proto/grant"

// inbox queues calls by tenant and hands them out one tenant after the other,
// so that a hot tenant cannot delay the decisions of the rest.
//
// Its bound is shared by dynamic thresholds: a tenant may queue as many calls as
// places are still free. A lone tenant gets half of the places, k greedy ones
// 1/(k+1) each, and a newcomer always finds room.
type inbox struct {
	limit  int
	size   int
	queues map[grant.TenantID]*queue
	turn   []*queue // queues with calls, in order of service
	next   int      // index in turn of the next queue to serve
	free   []*queue
	first  []Call // members and lists: before everything else
}

type queue struct {
	tenant grant.TenantID
	calls  []Call
	head   int
}

func (in *inbox) offer(c Call) bool {
	if in.size >= in.limit {
		return false
	}
	tenant, ok := c.tenant()
	if !ok {
		in.first = append(in.first, c)
		in.size++
		return true
	}
	q := in.queues[tenant]
	if q == nil {
		if n := len(in.free); n > 0 {
			q, in.free = in.free[n-1], in.free[:n-1]
		} else {
			q = new(queue)
		}
		q.tenant = tenant
		in.queues[tenant] = q
		in.turn = append(in.turn, q)
	} else if len(q.calls)-q.head >= in.limit-in.size {
		return false
	}
	q.calls = append(q.calls, c)
	in.size++
	return true
}

// take returns the next call in fair order.
func (in *inbox) take() (Call, bool) {
	if len(in.first) > 0 {
		c := in.first[0]
		in.first[0] = Call{}
		in.first = in.first[1:]
		in.size--
		return c, true
	}
	if len(in.turn) == 0 {
		return Call{}, false
	}
	if in.next >= len(in.turn) {
		in.next = 0
	}
	q := in.turn[in.next]
	c := q.calls[q.head]
	q.calls[q.head] = Call{}
	q.head++
	in.size--
	if q.head < len(q.calls) {
		if q.head >= 64 && 2*q.head >= len(q.calls) { // a queue that never empties must not grow
			n := copy(q.calls, q.calls[q.head:])
			clear(q.calls[n:])
			q.calls, q.head = q.calls[:n], 0
		}
		in.next++
		return c, true
	}
	// The queue is empty: the last one takes its turn, which only reorders
	// those that wait for the same round.
	last := len(in.turn) - 1
	in.turn[in.next] = in.turn[last]
	in.turn[last] = nil
	in.turn = in.turn[:last]
	delete(in.queues, q.tenant)
	q.calls, q.head, q.tenant = q.calls[:0], 0, ""
	if cap(q.calls) <= 1024 && len(in.free) < 256 {
		in.free = append(in.free, q)
	}
	return c, true
}

// tenant is the budget whose turn the call takes; ok is false for calls that
// concern the whole partition.
func (c *Call) tenant() (t grant.TenantID, ok bool) {
	switch {
	case c.Check != nil:
		return c.Check.Tenant, true
	case c.Grant != nil:
		return c.Grant.Tenant, true
	case c.Put != nil:
		return c.Put.Tenant, true
	case c.Get != nil:
		return c.Get.Tenant, true
	}
	return "", false
}
