package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
)

// drive is the goroutine that steps some partitions in rounds: it steps every
// one that has something to do, commits the records of all of them at once, and
// then releases their replies.
//
// One goroutine and one commit for each partition, the obvious form, spends more
// on waking goroutines, on batches of one decision and on frames of one answer
// than on deciding: with a load spread over all partitions a decision cost twice
// the CPU, and with 16 or 4 drives nearly so. A round grows with the load
// instead: what arrives while one is being synced makes the next.
//
// The price: a reply waits for the steps and the records of the other partitions
// in its round. MaxBatch bounds what a flooded partition adds, to a few
// milliseconds, and all of them share the disk's syncs anyway.
type drive struct {
	clock  clock
	commit func([]pebblestore.Part) error
	parts  []*partition

	dirty atomic.Uint64 // bit i: parts[i] has something to do
	wake  chan struct{} // capacity 1: dirty is not zero

	stepped []*partition // of the round, those that wait for the commit
	batch   []pebblestore.Part
	replies []authority.Reply
}

// newDrive makes a drive of at most 64 partitions, none of which has another.
func newDrive(clock clock, commit func([]pebblestore.Part) error, parts ...*partition) *drive {
	d := &drive{clock: clock, commit: commit, parts: parts, wake: make(chan struct{}, 1)}
	for i, p := range parts {
		p.drive, p.bit = d, 1<<i
		d.dirty.Or(p.bit) // the first round learns when each is due
	}
	return d
}

// mark says that partitions, by their bits, have something to do.
func (d *drive) mark(bits uint64) {
	if d.dirty.Or(bits)&bits == bits {
		return // whoever set them woke it
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// errAbrupt, as the cause of the context's end, lets a drive stop where it is:
// it decides nothing any more.
var errAbrupt = errors.New("this process must not serve any longer")

// run takes rounds until ctx ends, then decides what is queued and steps down.
// It returns an error only when a commit failed: the process must end.
func (d *drive) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		next, err := d.round()
		if err != nil {
			return err
		}
		if d.dirty.Load() != 0 {
			continue
		}
		var due <-chan time.Time
		if next != grant.Never {
			timer.Reset(next.Sub(d.clock().Mono))
			due = timer.C
		}
		select {
		case <-ctx.Done():
		case <-d.wake:
		case <-due:
		}
	}
	if context.Cause(ctx) == errAbrupt {
		return nil
	}
	return d.stepDown()
}

// round steps every partition that is marked or due. next is when the first
// one is due again.
func (d *drive) round() (next grant.Instant, err error) {
	now := d.clock()
	marked := d.dirty.Swap(0)
	for _, p := range d.parts {
		if marked&p.bit == 0 && p.due > now.Mono {
			continue
		}
		if records := p.step(now); len(records) > 0 {
			d.stepped = append(d.stepped, p)
			d.batch = append(d.batch, pebblestore.Part{Partition: p.id, Records: records})
			continue
		}
		d.replies = p.take(d.replies, now)
	}
	d.deliver() // these rest on nothing that is not durable
	if len(d.batch) > 0 {
		err = d.commit(d.batch)
		for _, p := range d.stepped {
			p.committed(err)
			d.replies = p.take(d.replies, now)
		}
		d.deliver()
		clear(d.stepped)
		clear(d.batch)
		d.stepped, d.batch = d.stepped[:0], d.batch[:0]
	}
	if err != nil {
		return 0, fmt.Errorf("drive: %w", err)
	}
	next = grant.Never
	for _, p := range d.parts {
		next = min(next, p.due)
	}
	return next, nil
}

// deliver hands out the replies of a round. A stream's sender is woken when it
// has all of them, so that they share a frame.
func (d *drive) deliver() {
	for _, r := range d.replies {
		d.parts[0].deliver(r)
	}
	for i, r := range d.replies {
		if s, ok := r.Caller.(*stream); ok {
			s.signal()
		}
		d.replies[i] = authority.Reply{}
	}
	d.replies = d.replies[:0]
}

// stepDown decides what is queued and persists ledger time.
func (d *drive) stepDown() error {
	for again := true; again; again = d.dirty.Load() != 0 {
		if _, err := d.round(); err != nil {
			return err
		}
	}
	now := d.clock()
	for _, p := range d.parts {
		if records := p.close(now); len(records) > 0 {
			d.batch = append(d.batch, pebblestore.Part{Partition: p.id, Records: records})
		}
	}
	var err error
	if len(d.batch) > 0 {
		if err = d.commit(d.batch); err != nil {
			err = fmt.Errorf("drive: persist ledger time: %w", err)
		}
	}
	for _, p := range d.parts {
		d.replies = p.take(d.replies, now)
	}
	d.deliver()
	return err
}
