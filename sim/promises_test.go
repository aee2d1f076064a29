package sim

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// promises are the rules of the design whose obvious alternative breaks, as far
// as they concern ledger and agents, each with the tests that fail when it is
// ignored. Rules of stores, membership and shells are tested where those live.
var promises = []struct{ rule, tests string }{
	{"nothing needs an incarnation to increase", "TestCase18SameNameManyLives"},
	{"while a request waits, later ones queue behind it", "TestCheapBesideDear"},
	{"a tenant over its limit sees 429, never 503", "TestSaturatedHears429 TestUtilisation"},
	{"every reply waits until all records stepped before it are durable", "TestRetryDuringCommitThatFails TestFailedCommitAnswersNobody TestRandomHistories TestLinearizable"},
	{"after a failed commit everybody, the parked included, is told to try again, and the memory is dropped", "TestFailedCommitAnswersNobody"},
	{"on every load the base of ledger time is taken anew", "TestReloadAnchorsLedgerTime"},
	{"the smaller of the two clocks counts", "TestSlowerClockCounts"},
	{"ledger time is persisted every 5 s while a bucket is not full", "TestSlowestRateManyRestarts TestTimeIsPersisted"},
	{"ledger time is persisted when the leader steps down", "TestTimeIsPersisted"},
	{"stepping down answers nothing that a failed commit could undo", "TestStepDownGrantsNothing"},
	{"raising B adds nothing at once", "TestRaisingTheBurstAddsNothing"},
	{"a deleted tenant's bucket and owners stay; re-adding continues them", "TestDeleteAndReAdd"},
	{"a retry is the same bytes; the hash covers tenant, incarnation, want, min, held", "TestCase15SameIDOtherRequest"},
	{"the hash never covers the deadline", "TestRetryWithLessTime"},
	{"the last grant id is answered again before any other check", "TestCase14LostAnswer TestReplayComesFirst"},
	{"held > recorded is refused", "TestHeldMoreThanRecorded"},
	{"the ledger enforces the sum", "TestOwnersAndQuantumChangeBothWays TestMoreParkedThanOwnersFit"},
	{"an answer renews what is held: one balance, one expiry", "TestGrantRenewsWhatIsHeld"},
	{"overloaded, unavailable and time-outs do not close a grant id", "TestBusyDoesNotCloseTheID"},
	{"the agent stops before the authority frees", "TestAgentStopsFirst TestNapBelowTolerance"},
	{"a lease's end frees nothing and refuses nobody; a discard frees at once and is final", "TestLostAndDiscarded"},
	{"enough for a parked request is max(min, min(want, r*20ms))", "TestParkedWaitsForASlice"},
	{"the owner granted longest ago goes first", "TestParkedOrder"},
	{"nobody overtakes", "TestNobodyOvertakes"},
	{"on waking a request is decided again under the policy of that moment", "TestParkedAreDecidedAgain TestParkedMeetTheirFate TestMoreParkedThanOwnersFit"},
	{"while grants are parked, Checks get half of the refill", "TestChecksBesideParkedGrants"},
	{"at or below the low-water mark an attempt is refused", "TestCheckAfterItsWindow"},
	{"the same attempt with other parameters is refused", "TestCase30AttemptsAskedAgain"},
	{"an answer is credited once, and only if it answers the open id", "TestAnswerForClosedID TestCase16AnswersManyTimes TestMillionGrants"},
	{"a policy copy lives 10 s", "TestPolicyCopyRunsOut"},
	{"a balance is dropped when the clocks' offset moved since the request was first sent", "TestSuspendDuringGrant TestCase08ClockSteps"},
	{"a guard that distrusts the clocks taints what is on its way", "TestGuardDistrustsOpenRequest"},
	{"the same guard protects a Check's ALLOW", "TestSuspendDuringCheck"},
	{"overload is not loss of the centre", "TestCase25OverloadIsNotLoss"},
}

// Every test that the list names is there.
func TestPromisesAreTested(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	have := make(map[string]bool)
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), e.Name(), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				have[fn.Name.Name] = true
			}
		}
	}
	for _, p := range promises {
		for name := range strings.FieldsSeq(p.tests) {
			if !have[name] {
				t.Errorf("%q names %s, which is not there", p.rule, name)
			}
		}
	}
}

// A crash loses at most PersistTimeEvery of ledger time while a bucket is not
// full, and stepping down none.
func TestTimeIsPersisted(t *testing.T) {
	l := newLab(t, policy(1, 1000, 0, 0, 0), 0)
	l.allowed(1000)
	l.advance(100 * time.Second)
	l.crash(time.Hour)
	if got := l.level(); got < 95 || got > 100 {
		t.Errorf("level %d after 100 s and a crash, want 95 to 100", got)
	}
	l.check("c", 1)
	before := l.level()
	l.advance(3 * time.Second)
	l.Commit(0, l.node.Close(l.reading()))
	l.crash(time.Hour)
	if got := l.level(); got != before+3 {
		t.Errorf("level %d 3 s later and after stepping down, want %d", got, before+3)
	}
}

// A retry has less time left and knows another policy: it is the same request.
func TestRetryWithLessTime(t *testing.T) {
	l := newLab(t, policy(0, 100, 20, 5, 10*time.Second), 1)
	r := grantRequest(0, 1, 20, 1, 0)
	isGrant(t, l.ask(r), 20)
	r.Age, r.KnownVersion = 3*time.Second, 1
	isGrant(t, l.ask(r), 20)
	c := l.checkRequest("five", 1)
	l.send(c)
	c.Budget, c.KnownVersion = time.Millisecond, 1
	if a := l.send(c); a.Verdict != grant.Allow || !a.Replayed {
		t.Errorf("a repeated Check: %v %v, replayed %v", a.Verdict, a.Reason, a.Replayed)
	}
	if got := l.level(); got != 75 {
		t.Errorf("level %d, want 75", got)
	}
}

// What was granted is answered again whatever happened since: no room, no policy,
// a final incarnation.
func TestReplayComesFirst(t *testing.T) {
	p := policy(0, 100, 20, 1, 10*time.Second)
	r := grantRequest(0, 1, 20, 1, 0)
	for name, then := range map[string]func(*lab){
		"no grants":  func(l *lab) { l.mustPut(policy(0, 100, 0, 0, 10*time.Second)) },
		"deleted":    func(l *lab) { l.mustPut(nil) },
		"fenced":     func(l *lab) { l.member(0, authority.Fenced) },
		"superseded": func(l *lab) { l.member(0, authority.Superseded) },
		"crash":      func(l *lab) { l.crash(time.Hour) },
	} {
		l := newLab(t, p, 2)
		isGrant(t, l.ask(r), 20)
		then(l)
		if a := l.ask(r); a.Result != grant.Granted || a.Units != 20 {
			t.Errorf("%s: %v %v of %d", name, a.Result, a.Reason, a.Units)
		}
	}
}

// Each answer renews all that is held, at the authority too.
func TestGrantRenewsWhatIsHeld(t *testing.T) {
	ttl := 10 * time.Second
	l := newLab(t, policy(0, 1000, 10, 1, ttl), 2)
	isGrant(t, l.ask(grantRequest(0, 1, 6, 1, 0)), 6)
	l.advance(8 * time.Second)
	isGrant(t, l.ask(grantRequest(0, 2, 10, 1, 6)), 4)
	l.advance(8 * time.Second) // the first grant alone would be gone
	if got := l.state().Ordinary.Outstanding; got != 10 {
		t.Errorf("outstanding %d, want all 10 of the renewed balance", got)
	}
	answered(t, l.ask(grantRequest(1, 1, 1, 1, 0)), grant.Empty, grant.NoRoom)
	l.advance(4 * time.Second)
	isGrant(t, l.ask(grantRequest(1, 2, 10, 1, 0)), 10)
}

// The authority is overloaded and then not: the agent repeats the id that it has
// open, with the same bytes, and does not ask for more beside it.
func TestBusyDoesNotCloseTheID(t *testing.T) {
	w := newWorld(t, paranoid(31), 1)
	put(t, w, acme, policy(1000, 1000, 50, 2, 20*time.Second))
	g, e := w.Gateways()[0], wake(t, w, 0)
	w.Center.Overload = true
	for !e.accounts[0].open {
		g.Request(acme, "c", 1, time.Second, nil)
	}
	id := e.accounts[0].sent
	run(t, w, 3*time.Second)
	if e.accounts[0].sent != id || e.Stats().Retries == 0 {
		t.Errorf("request %d is open, request %d was sent while the centre was busy, %d retries", id, e.accounts[0].sent, e.Stats().Retries)
	}
	w.Center.Overload = false
	run(t, w, 2*time.Second)
	if !w.Judge.Tenant(acme).of(g.inc, false).granted[id].credited {
		t.Errorf("request %d was not granted in the end", id)
	}
	held(t, w)
}

// The end of a lease frees no room and refuses nobody; a discard frees at once.
func TestLostAndDiscarded(t *testing.T) {
	l := newLab(t, policy(0, 1000, 10, 1, 10*time.Second), 2)
	isGrant(t, l.ask(grantRequest(0, 1, 10, 1, 0)), 10)
	l.member(0, authority.Lost)
	answered(t, l.ask(grantRequest(1, 1, 1, 1, 0)), grant.Empty, grant.NoRoom)
	isGrant(t, l.ask(grantRequest(0, 2, 10, 1, 3)), 7)
	l.member(0, authority.Live)
	answered(t, l.ask(grantRequest(1, 2, 1, 1, 0)), grant.Empty, grant.NoRoom)
	l.member(0, authority.Discarded)
	isGrant(t, l.ask(grantRequest(1, 3, 10, 1, 0)), 10)
	answered(t, l.ask(grantRequest(0, 3, 10, 1, 0)), grant.Refused, grant.Discarded)
}

// A parked request waits for 20 ms of refill, no more and no less, unless its
// oldest waiter needs more.
func TestParkedWaitsForASlice(t *testing.T) {
	for _, c := range []struct{ least, want, units grant.Units }{{1, 100, 20}, {35, 100, 35}, {1, 4, 4}} {
		l := newLab(t, policy(1000, 1000, 100, 2, 10*time.Second), 1)
		l.allowed(1000)
		r := grantRequest(0, 1, c.want, c.least, 0)
		n := l.offer(authority.Call{Grant: &r})
		l.step(nil)
		l.advance(time.Duration(c.units)*time.Millisecond - 1)
		if got := l.replies[n].Grant.Result; got != grant.Parked {
			t.Errorf("want %d, min %d: %v before %d units were there", c.want, c.least, got, c.units)
		}
		l.advance(1)
		isGrant(t, *l.replies[n].Grant, c.units)
	}
}

// A small request that comes while a larger one waits must wait too, though the
// level would do for it.
func TestNobodyOvertakes(t *testing.T) {
	l := newLab(t, policy(10, 10, 10, 4, 30*time.Second), 2)
	l.allowed(10)
	large, small := grantRequest(0, 1, 5, 5, 0), grantRequest(1, 1, 1, 1, 0)
	first := l.offer(authority.Call{Grant: &large})
	l.step(nil)
	l.advance(300 * time.Millisecond) // 3 units
	answered(t, l.ask(small), grant.Parked, grant.Over)
	second := l.next
	l.advance(200 * time.Millisecond)
	isGrant(t, *l.replies[first].Grant, 5)
	answered(t, *l.replies[second].Grant, grant.Parked, grant.Over)
	l.advance(100 * time.Millisecond)
	isGrant(t, *l.replies[second].Grant, 1)
}

// Without a word from the authority for 10 s the prices are not known any more:
// what is held is not spent by them while the link is up and one can ask. After
// loss of the centre there is nobody to ask, and it is spent.
func TestPolicyCopyRunsOut(t *testing.T) {
	cfg := paranoid(32)
	cfg.Net.Silence = 20 * time.Second // the link stays up
	w := newWorld(t, cfg, 1)
	put(t, w, acme, policy(0, 1000, 100, 1, time.Hour))
	w.Offer(Load{Tenant: acme, Class: "c", Every: Steady(50), At: On(0), Until: w.Now().Add(3 * time.Second)})
	run(t, w, 3*time.Second) // the last word is at most one grant old
	g := w.Gateways()[0]
	e := g.tenants[acme]
	w.Center.Pause(false)
	run(t, w, 8*time.Second)
	if e.Stats().Held == 0 {
		t.Fatal("nothing is held: the test tests nothing")
	}
	spend := func() grant.Units {
		before := w.Judge.Tenant(acme).Counts.Units
		g.Request(acme, "c", 1, time.Second, nil)
		run(t, w, 100*time.Millisecond)
		return w.Judge.Tenant(acme).Counts.Units - before
	}
	if spend() != 1 {
		t.Error("units were not spent although the copy is young")
	}
	run(t, w, grant.PolicyCopyLife)
	if spend() != 0 {
		t.Error("a unit was spent by prices that nobody has confirmed for more than 10 s")
	}
	w.Center.Crash()
	run(t, w, w.cfg.Agent.LostAfter+time.Second)
	if spend() != 1 {
		t.Error("units were not spent although the centre is lost")
	}
	held(t, w)
}
