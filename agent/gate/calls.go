package gate

import (
	"sync"

	"github.com/stipend/stipend/proto/grant"
)

// calls is the coarse ceiling on Checks in flight: in total, and for one tenant,
// so that an abuser cannot take all. A Check leaves it with its answer, with
// the stream, or when it has been unanswered for the link's silence.
//
// Invariants: len(open) <= max; the checks of an entry are at most share.
type calls struct {
	max, share int
	life       grant.Instant // added to the sending, in nanoseconds

	mu    sync.Mutex
	open  map[uint64]*entry // by the attempt's sequence
	order []call            // by sending, answered ones among them
	head  int
}

type call struct {
	seq   uint64
	until grant.Instant
}

// begin counts a Check; false when one of the ceilings is reached. Sending the
// same attempt again counts once.
func (c *calls) begin(e *entry, seq uint64, now grant.Instant) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, again := c.open[seq]; again {
		return true
	}
	for c.head < len(c.order) {
		first := c.order[c.head]
		if _, waits := c.open[first.seq]; waits && first.until > now {
			break
		}
		c.remove(first.seq)
		c.head++
	}
	if len(c.order) >= 4*c.max {
		// At most max of them are open: the next 3*max sendings pay for this.
		keep := c.order[:0]
		for _, o := range c.order[c.head:] {
			if _, waits := c.open[o.seq]; waits {
				keep = append(keep, o)
			}
		}
		c.order, c.head = keep, 0
	}
	if len(c.open) >= c.max || e.checks >= c.share {
		return false
	}
	c.open[seq] = e
	e.checks++
	c.order = append(c.order, call{seq, now + c.life})
	return true
}

// end forgets a Check.
func (c *calls) end(seq uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(seq)
}

func (c *calls) remove(seq uint64) {
	if e := c.open[seq]; e != nil {
		e.checks--
		delete(c.open, seq)
	}
}

// reset forgets all: the stream that carried them is gone.
func (c *calls) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for seq := range c.open {
		c.remove(seq)
	}
	c.order, c.head = c.order[:0], 0
}

func (c *calls) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.open)
}
