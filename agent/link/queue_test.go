package link

import (
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

func newQueue() *queue { return &queue{limit: 1000, wake: make(chan struct{}, 1)} }

func putChecks(q *queue, n int, budget time.Duration) {
	for i := range n {
		q.putCheck(&grant.CheckRequest{Tenant: "t", Class: "c", Count: 1, Budget: budget,
			Attempt: grant.Attempt{Seq: uint64(i + 1)}})
	}
}

// In slow start nothing follows the first batch, however small, before an
// answer has come; then the window counts, and at last only the batch's size.
func TestQueueSlowStart(t *testing.T) {
	q, now := newQueue(), time.Now()
	q.reset(100)
	putChecks(q, 3, time.Hour)
	if b := q.next(now); len(b.GetChecks()) != 3 {
		t.Fatalf("first batch: %v", b)
	}
	putChecks(q, 900, time.Hour)
	if b := q.next(now); b != nil {
		t.Errorf("%d entries follow before the first answer", len(b.Checks))
	}
	q.heard(now, 3)
	if b := q.next(now); len(b.GetChecks()) != firstWindow+3 {
		t.Errorf("after 3 answers %d entries, want the window of %d", len(b.GetChecks()), firstWindow+3)
	}
	if b := q.next(now); b != nil {
		t.Errorf("%d entries beyond the window", len(b.Checks))
	}
	for q.slow {
		q.heard(now, 100)
	}
	for range 3 {
		if b := q.next(now); len(b.GetChecks()) != 100 {
			t.Errorf("after slow start a batch of %d", len(b.GetChecks()))
		}
	}
}

// What waited here grew older here: grants by age, Checks by budget, and a
// Check without budget does not go out.
func TestQueueAges(t *testing.T) {
	q := newQueue()
	q.reset(100)
	q.putGrant(&grant.GrantRequest{Tenant: "t", ID: 1, Want: 1, Min: 1, Age: time.Second})
	putChecks(q, 1, time.Second)
	putChecks(q, 1, time.Minute)
	b := q.next(time.Now().Add(10 * time.Second))
	if len(b.GetGrants()) != 1 || len(b.GetChecks()) != 1 {
		t.Fatalf("batch: %v", b)
	}
	if age := b.Grants[0].Age.AsDuration(); age < 11*time.Second || age > 12*time.Second {
		t.Errorf("age: %v after ten more seconds", age)
	}
	if left := b.Checks[0].Budget.AsDuration(); left > 50*time.Second || left < 49*time.Second {
		t.Errorf("budget: %v of a minute after ten seconds", left)
	}
}

// Neither kind starves the other in a batch that is too small for both.
func TestQueueShares(t *testing.T) {
	q := newQueue()
	q.reset(10)
	q.slow = false
	for i := range 50 {
		q.putGrant(&grant.GrantRequest{Tenant: "t", ID: grant.GrantID(i + 1), Want: 1, Min: 1})
	}
	putChecks(q, 50, time.Hour)
	if b := q.next(time.Now()); len(b.Grants) != 5 || len(b.Checks) != 5 {
		t.Errorf("%d grants and %d checks", len(b.Grants), len(b.Checks))
	}
	q.shut()
	if q.depth() != 0 || q.next(time.Now()) != nil {
		t.Error("a shut queue holds something")
	}
}
