package gate

import (
	"container/heap"
	"sync"

	"github.com/stipend/stipend/proto/grant"
)

// alarms is the heap of the entries' wake-ups, earliest first.
type alarms struct {
	nudge chan struct{} // holds one token when the earliest changed

	mu sync.Mutex
	h  alarmHeap
}

type alarmHeap []*entry

func (h alarmHeap) Len() int           { return len(h) }
func (h alarmHeap) Less(i, j int) bool { return h[i].wake < h[j].wake }
func (h alarmHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}
func (h *alarmHeap) Push(x any) {
	e := x.(*entry)
	e.place = len(*h)
	*h = append(*h, e)
}
func (h *alarmHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	e.place = -1
	return e
}

// set moves the entry's wake-up; Never removes it.
func (a *alarms) set(e *entry, at grant.Instant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case at == grant.Never:
		if e.place >= 0 {
			heap.Remove(&a.h, e.place)
		}
		return
	case e.place < 0:
		e.wake = at
		heap.Push(&a.h, e)
	case e.wake == at:
		return
	default:
		e.wake = at
		heap.Fix(&a.h, e.place)
	}
	if e.place == 0 {
		select {
		case a.nudge <- struct{}{}:
		default:
		}
	}
}

// due takes one entry whose time has come, or tells when the next one's comes.
func (a *alarms) due(now grant.Instant) (e *entry, next grant.Instant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.h) == 0 {
		return nil, grant.Never
	}
	if a.h[0].wake > now {
		return nil, a.h[0].wake
	}
	return heap.Pop(&a.h).(*entry), 0
}
