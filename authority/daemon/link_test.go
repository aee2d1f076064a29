package daemon

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

const granted = stipendv1.GrantResult_GRANT_RESULT_GRANTED

// Cases 13, 14, 15 through the real thing: one grant deducts q once, the same
// bytes bring the same answer, the same id with other units is refused.
func TestGrantAndRetry(t *testing.T) {
	r := sharedDaemon(t)
	r.put("hot", slowPolicy())
	a := r.mustLink("hot-gw", grant.NewIncarnation())
	if a.hello.MaxBatch != 1024 || a.hello.RhoPpb != 1_000_000 || a.hello.Store == "" || a.hello.WasLost {
		t.Errorf("welcome: %v", a.hello)
	}
	first := a.ask(a.request("hot", 1, 20, 0))
	if first.Result != granted || first.Units != 20 || first.Ttl.AsDuration() != 10*time.Second {
		t.Fatalf("first: %v", first)
	}
	if again := a.ask(a.request("hot", 1, 20, 0)); again.Result != granted || again.Units != 20 {
		t.Errorf("the same bytes: %v", again)
	}
	if other := a.ask(a.request("hot", 1, 10, 0)); other.Result != stipendv1.GrantResult_GRANT_RESULT_REFUSED || other.Reason != stipendv1.Reason_REASON_CONFLICT {
		t.Errorf("other units under the same id: %v", other)
	}
	// The answer is known to a new stream of the same incarnation, too.
	b := r.mustLink("hot-gw", a.inc)
	if code, _ := a.ended(); code != codes.Aborted {
		t.Errorf("the older stream ended with %v", code)
	}
	if again := b.ask(b.request("hot", 1, 20, 0)); again.Result != granted || again.Units != 20 {
		t.Errorf("the same bytes on a new stream: %v", again)
	}
	state := r.tenant("hot")
	if state.Ordinary.Level != 80 || state.Ordinary.Outstanding != 20 || state.Ordinary.Slack != 80 {
		t.Errorf("level %d, outstanding %d, slack %d; want 80, 20, 80", state.Ordinary.Level, state.Ordinary.Outstanding, state.Ordinary.Slack)
	}
	if o := state.Ordinary.Owners; len(o) != 1 || o[0].Owner != "hot-gw" || o[0].State != "live" || o[0].LastGrantId != 1 {
		t.Errorf("owners %v", o)
	}
}

// One frame for tenants of many partitions: every entry is answered.
func TestManyPartitionsInOneFrame(t *testing.T) {
	r := sharedDaemon(t)
	a := r.mustLink("many-gw", grant.NewIncarnation())
	var batch []*stipendv1.CheckRequest
	for n := range 200 {
		tenant := "many-" + string(rune('a'+n%26)) + string(rune('a'+n/26))
		r.put(tenant, slowPolicy())
		batch = append(batch, a.checkRequest(tenant, "read", uint64(n+1), time.Minute))
	}
	for _, c := range a.check(batch...) {
		if c.Verdict != stipendv1.Verdict_VERDICT_ALLOW {
			t.Errorf("%v", c)
		}
	}
}

// A policy that changes is pushed to who holds units of the tenant.
func TestPolicyPush(t *testing.T) {
	r := sharedDaemon(t)
	r.put("push", slowPolicy())
	holder := r.mustLink("push-gw", grant.NewIncarnation())
	holder.ask(holder.request("push", 1, 5, 0))
	p := slowPolicy()
	p.Burst = 60
	version := r.put("push", p)
	holder.until("the push", func() bool { return len(holder.policies) > 0 })
	if got := holder.policies[0]; got.Tenant != "push" || got.Version != version || !proto.Equal(got.Policy, wire.ToPolicy(p)) {
		t.Errorf("pushed %v", got)
	}
}

// A clean discard frees the room at once and is final; it is confirmed only
// when every partition knows.
func TestDiscard(t *testing.T) {
	r := sharedDaemon(t)
	r.put("disc", slowPolicy())
	a := r.mustLink("disc-gw", grant.NewIncarnation())
	a.ask(a.request("disc", 1, 20, 0))
	a.discard()
	a.until("the confirmation", func() bool { return a.gone })
	if out := r.tenant("disc").Ordinary.Outstanding; out != 0 {
		t.Errorf("outstanding %d after the confirmation", out)
	}
	if got := a.ask(a.request("disc", 2, 20, 0)); got.Result != stipendv1.GrantResult_GRANT_RESULT_REFUSED || got.Reason != stipendv1.Reason_REASON_DISCARDED {
		t.Errorf("a grant afterwards: %v", got)
	}
	_, err := r.link("disc-gw", a.inc)
	wants(t, "it opens again", err, codes.FailedPrecondition, grant.Discarded)
}

// Case 18: a newer process of the same name ends the older one, whose units
// count until they expire; an empty name is refused.
func TestSupersede(t *testing.T) {
	r := sharedDaemon(t)
	r.put("super", slowPolicy())
	older := r.mustLink("super-gw", grant.NewIncarnation())
	older.ask(older.request("super", 1, 20, 0))
	newer := r.mustLink("super-gw", grant.NewIncarnation())
	// The welcome of the newer one says that every partition knows.
	if got := older.ask(older.request("super", 2, 20, 20)); got.Result != stipendv1.GrantResult_GRANT_RESULT_REFUSED || got.Reason != stipendv1.Reason_REASON_SUPERSEDED {
		t.Errorf("the older one asks: %v", got)
	}
	older.until("the fate", func() bool { return older.fate != 0 })
	if older.fate != stipendv1.Reason_REASON_SUPERSEDED {
		t.Errorf("fate %v", older.fate)
	}
	if got := newer.ask(newer.request("super", 1, 20, 0)); got.Result != granted {
		t.Errorf("the newer one asks: %v", got)
	}
	if out := r.tenant("super").Ordinary.Outstanding; out != 40 {
		t.Errorf("outstanding %d; the older one's 20 still count", out)
	}
	_, err := r.link("", grant.NewIncarnation())
	wants(t, "an empty name", err, codes.InvalidArgument, grant.Invalid)
	older.discard() // its wallet closes: the room is free at once
	older.until("the confirmation", func() bool { return older.gone })
	if out := r.tenant("super").Ordinary.Outstanding; out != 20 {
		t.Errorf("outstanding %d after the older one discarded", out)
	}
}

// Two gateways of one name by mistake: the older one gets no grants and decides
// by Check, also on a new stream, as after a restart of the authority. Its fate
// is the first thing that it hears there.
func TestSupersededChecksOnANewStream(t *testing.T) {
	r := sharedDaemon(t)
	r.put("super-again", slowPolicy())
	first := r.mustLink("super-again-gw", grant.NewIncarnation())
	r.mustLink("super-again-gw", grant.NewIncarnation())
	again := r.mustLink("super-again-gw", first.inc)
	again.until("the fate", func() bool { return again.fate == stipendv1.Reason_REASON_SUPERSEDED })
	if got := again.check(again.checkRequest("super-again", "read", 1, time.Second))[0]; got.Verdict != stipendv1.Verdict_VERDICT_ALLOW {
		t.Errorf("a Check: %v", got)
	}
	if got := again.ask(again.request("super-again", 1, 20, 0)); got.Result != stipendv1.GrantResult_GRANT_RESULT_REFUSED || got.Reason != stipendv1.Reason_REASON_SUPERSEDED {
		t.Errorf("a grant: %v", got)
	}
	again.discard()
	again.until("the confirmation", func() bool { return again.gone })
}

// What a stranger sends: a stream that breaks the protocol ends with a reason,
// a faulty entry is refused alone.
func TestFaultyFrames(t *testing.T) {
	r := sharedDaemon(t)
	r.put("faulty", slowPolicy())
	s, err := stipendv1.NewLinkServiceClient(r.conn).Link(ctxOf(t))
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, stream: s}
	a.discard()
	if code, why := a.ended(); code != codes.InvalidArgument || why != grant.Invalid.String() {
		t.Errorf("no open: %v %v", code, why)
	}
	a = r.mustLink("faulty-gw", grant.NewIncarnation())
	bad := a.checkRequest("faulty", "read", 1, time.Minute)
	bad.Fingerprint[0]++
	badGrant := wire.ToGrantRequest(a.request("faulty", 1, 20, 0))
	badGrant.Min = 30
	a.batch(&stipendv1.AgentBatch{Checks: []*stipendv1.CheckRequest{bad, a.checkRequest("faulty", "read", 2, time.Minute)}, Grants: []*stipendv1.GrantRequest{badGrant}})
	a.until("three answers", func() bool { return len(a.checks) == 2 && len(a.grants) == 1 })
	for _, c := range a.checks {
		want := stipendv1.Verdict_VERDICT_REJECT
		if c.Sequence == 2 {
			want = stipendv1.Verdict_VERDICT_ALLOW
		}
		if c.Verdict != want {
			t.Errorf("check %d: %v", c.Sequence, c)
		}
	}
	if g := a.grants[0]; g.Result != stipendv1.GrantResult_GRANT_RESULT_REFUSED || g.GrantId != 1 {
		t.Errorf("a faulty grant request: %v", g)
	}
	many := make([]*stipendv1.CheckRequest, 1025)
	for i := range many {
		many[i] = &stipendv1.CheckRequest{}
	}
	a.batch(&stipendv1.AgentBatch{Checks: many})
	if code, why := a.ended(); code != codes.InvalidArgument || why != grant.Invalid.String() {
		t.Errorf("a frame too large: %v %v", code, why)
	}
}

// An agent that comes back under its own id after its lease ended is told so.
func TestWasLost(t *testing.T) {
	r := sharedDaemon(t)
	a := r.mustLink("away-gw", grant.NewIncarnation())
	a.leave()
	journal.await(t, "incarnation changed", a.inc, "lost")
	if back := r.mustLink("away-gw", a.inc); !back.hello.WasLost {
		t.Error("the welcome does not say that it was lost")
	}
}

// A queue that its agent does not drain ends the stream and nothing else:
// receive never blocks, and what comes later is dropped.
func TestSlowAgent(t *testing.T) {
	s := newStream("gw", grant.NewIncarnation(), 2)
	for range 5 {
		s.receive(authority.Reply{Check: &grant.CheckAnswer{}})
	}
	select {
	case <-s.quit:
	default:
		t.Fatal("the stream goes on")
	}
	if status.Code(s.ended) != codes.ResourceExhausted || len(s.queue) != 0 {
		t.Errorf("ended with %v, %d queued", s.ended, len(s.queue))
	}
}

// An agent that never reads loses its stream although the sender is blocked in
// flow control, and others are served meanwhile.
func TestAgentThatNeverReads(t *testing.T) {
	cfg := testConfig(t.TempDir())
	// Long names make the answers fill every window long before the queue.
	cfg.Link.MaxBatch, cfg.Link.MaxQueued = 64, 8192
	nobody := strings.Repeat("n", grant.MaxTenantLen)
	lines := &log{more: make(chan struct{})}
	cfg.Logger = slog.New(lines)
	r, err := begin(t, cfg)
	must(t, r, err)
	r.put("read", slowPolicy())
	deaf := r.mustLink("deaf", grant.NewIncarnation())
	pumped := make(chan struct{})
	go func() {
		defer close(pumped)
		seq := uint64(0)
		for {
			batch := &stipendv1.AgentBatch{}
			for range 64 {
				seq++
				batch.Checks = append(batch.Checks, deaf.checkRequest(nobody, "read", seq, time.Minute))
			}
			if deaf.stream.Send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Batch{Batch: batch}}) != nil {
				return
			}
		}
	}()
	lines.await(t, "agent gone deaf", deaf.inc, "does not read")
	a := r.mustLink("other", grant.NewIncarnation())
	if got := a.check(a.checkRequest("read", "read", 1, time.Minute))[0]; got.Verdict != stipendv1.Verdict_VERDICT_ALLOW {
		t.Errorf("another agent meanwhile: %v", got)
	}
	a.leave()
	r.conn.Close() // the deaf one would send for ever
	<-pumped
}
