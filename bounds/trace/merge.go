package trace

import (
	"container/heap"
	"fmt"
	"iter"

	"github.com/stipend/stipend/bounds"
)

// Merge yields the records of several files in order of time, as one file. The
// clocks of all must be the same. It holds one record of each Reader beside
// what the Readers hold.
func Merge(readers ...*Reader) (iter.Seq2[Record, error], error) {
	for _, r := range readers {
		if r.header.Clock != readers[0].header.Clock {
			return nil, fmt.Errorf("trace: %s: clock: %q; allowed: %q as in %s: times of different clocks are never compared",
				r.opts.File, r.header.Clock, readers[0].header.Clock, readers[0].opts.File)
		}
	}
	return func(yield func(Record, error) bool) {
		var heads held
		pulls := make([]func() (Record, error, bool), len(readers))
		line := make([]int64, len(readers))
		advance := func(i int) error {
			rec, err, ok := pulls[i]()
			if err != nil || !ok {
				return err
			}
			line[i], rec.Line = rec.Line, int64(i) // ties go by the order of the files
			heap.Push(&heads, rec)
			return nil
		}
		for i, r := range readers {
			next, stop := iter.Pull2(r.Records())
			defer stop()
			pulls[i] = next
			if err := advance(i); err != nil {
				yield(Record{}, err)
				return
			}
		}
		for len(heads) > 0 {
			rec := heap.Pop(&heads).(Record)
			i := int(rec.Line)
			rec.Line = line[i]
			if !yield(rec, nil) {
				return
			}
			if err := advance(i); err != nil {
				yield(Record{}, err)
				return
			}
		}
	}, nil
}

// Judge gives every record to the judge and returns how many there were. It
// stops at the first error of either side.
func Judge(j *bounds.Judge, records iter.Seq2[Record, error]) (n uint64, err error) {
	for rec, err := range records {
		if err != nil {
			return n, err
		}
		if err := j.Admit(rec.Tenant, rec.At, rec.Cost); err != nil {
			return n, fmt.Errorf("%s:%d: %w", rec.File, rec.Line, err)
		}
		n++
	}
	return n, nil
}
