package authority_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// TestStories replays scripts of one partition's life. Run with -rewrite to
// accept new output, and read the difference.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		w := newWorld(t)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			w.t = t
			return w.tell(t, d)
		})
	})
}

func (w *world) tell(t *testing.T, d *datadriven.TestData) string {
	arg := func(key, def string) string {
		var s string
		if d.MaybeScanArgs(t, key, &s) {
			return s
		}
		return def
	}
	num := func(key string, def int64) int64 {
		var n int64
		if d.MaybeScanArgs(t, key, &n) {
			return n
		}
		return def
	}
	span := func(key, def string) time.Duration {
		v, err := time.ParseDuration(arg(key, def))
		if err != nil {
			d.Fatalf(t, "%s: %v", key, err)
		}
		return v
	}
	tenant := grant.TenantID(arg("tenant", "acme"))
	switch d.Cmd {
	case "policy": // policy rate=10 per=1s burst=100 q=10 owners=3 ttl=10s cost=1 mode=enforce
		p := plain(grant.Units(num("rate", 10)), span("per", "1s"), grant.Units(num("burst", 100)))
		p.Classes["op"] = grant.Class{Cost: grant.Units(num("cost", 1))}
		p = withGrants(p, grant.Units(num("q", 0)), int(num("owners", 0)), span("ttl", "10s"))
		mode, err := grant.ParseMode(arg("mode", "enforce"))
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		p.Mode = mode
		put := &authority.PutPolicy{Tenant: tenant, Policy: p, Expected: uint64(num("expect", 0)), AnyVersion: !d.HasArg("expect")}
		return w.show(w.call(authority.Call{Caller: "put", Put: put}))
	case "delete":
		return w.show(w.call(authority.Call{Caller: "put", Put: &authority.PutPolicy{Tenant: tenant, AnyVersion: true}}))
	case "join":
		for _, a := range d.CmdArgs {
			w.join(a.Key)
		}
		return ""
	case "lost", "discard", "fence", "supersede":
		states := map[string]authority.MemberState{"lost": authority.Lost, "discard": authority.Discarded, "fence": authority.Fenced, "supersede": authority.Superseded}
		i := inc(d.CmdArgs[0].Key)
		owner := w.live[i]
		delete(w.live, i)
		return w.show(w.call(authority.Call{Caller: "member", Member: &authority.Member{Incarnation: i, Owner: owner, State: states[d.Cmd]}}))
	case "grant": // grant gw=a id=1 want=10 min=1 held=0 age=0s; several lines of input: one request each
		r := grantOf(tenant, inc(arg("gw", "a")), grant.GrantID(num("id", 1)), grant.Units(num("want", 1)), grant.Units(num("min", 1)), grant.Units(num("held", 0)))
		r.Age = span("age", "0s")
		w.offer(authority.Call{Caller: arg("gw", "a"), Grant: r})
		if d.HasArg("later") {
			return ""
		}
		return w.show(w.step())
	case "check":
		r := checkOf(tenant, inc(arg("gw", "a")), uint64(num("seq", 1)), grant.RouteClass(arg("class", "op")), grant.Units(num("count", 1)))
		w.offer(authority.Call{Caller: arg("gw", "a"), Check: r})
		if d.HasArg("later") {
			return ""
		}
		return w.show(w.step())
	case "drain": // a Check for all there is
		w.seq++
		n := w.state(tenant).Ordinary.Level
		return w.show(w.call(authority.Call{Caller: "drain", Check: checkOf(tenant, inc("drain"), w.seq, "op", n)}))
	case "step":
		return w.show(w.step())
	case "advance":
		v, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		return w.show(w.advance(v))
	case "fail-commit":
		return w.show(w.failCommit(d.HasArg("applied")))
	case "crash": // memory is lost; the machine's clocks start elsewhere
		w.now = w.now.Add(span("down", "0s"))
		w.boot += grant.Instant(span("clocks", "0s"))
		w.load()
		return ""
	case "recover":
		w.store.records["R"] = []byte{0, 0, 0, 0, 0, 0, 0, 0}
		v := uint64(span("ttl", "1m"))
		for i := range 8 {
			w.store.records["R"][7-i] = byte(v >> (8 * i))
		}
		w.load()
		return ""
	case "records":
		var b strings.Builder
		kinds := map[byte]int{}
		for k := range w.store.records {
			kinds[k[0]]++
		}
		for _, k := range "BDLMOPRTV" {
			if kinds[byte(k)] > 0 {
				fmt.Fprintf(&b, "%c=%d ", k, kinds[byte(k)])
			}
		}
		return strings.TrimSpace(b.String()) + "\n"
	case "state":
		return describe(w.state(tenant))
	}
	d.Fatalf(t, "no such command")
	return ""
}

func (w *world) show(replies []authority.Reply) string {
	var b strings.Builder
	for _, r := range replies {
		switch {
		case r.Grant != nil:
			g := r.Grant
			fmt.Fprintf(&b, "grant %v/%d: %v", r.Caller, g.ID, g.Result)
			if g.Reason != grant.None {
				fmt.Fprintf(&b, " (%v)", g.Reason)
			}
			if g.Result == grant.Granted {
				fmt.Fprintf(&b, " %d for %v", g.Units, g.TTL)
			}
			if g.Result == grant.Parked {
				fmt.Fprintf(&b, " about %v", g.Wait)
			}
		case r.Check != nil:
			c := r.Check
			fmt.Fprintf(&b, "check %v/%d: %v", r.Caller, c.Attempt.Seq, c.Verdict)
			if c.Reason != grant.None {
				fmt.Fprintf(&b, " (%v)", c.Reason)
			}
			if c.Replayed {
				fmt.Fprint(&b, " replayed")
			}
			if c.Shadow {
				fmt.Fprint(&b, " shadow")
			}
			fmt.Fprintf(&b, " cost %d", c.Cost)
			if c.Verdict == grant.Deny && c.Reason == grant.Over {
				fmt.Fprintf(&b, " retry after %v, affordable in %v", c.RetryAfter, c.Affordable)
			}
		case r.Put != nil:
			fmt.Fprintf(&b, "policy version %d", r.Put.Version)
			if r.Put.Reason != grant.None {
				fmt.Fprintf(&b, " (%v)", r.Put.Reason)
			}
			if r.Put.Unchanged {
				fmt.Fprint(&b, " unchanged")
			}
			for _, p := range r.Put.Problems {
				fmt.Fprintf(&b, "\n  %v", p)
			}
		case r.Member != nil:
			fmt.Fprintf(&b, "member is %v", r.Member.State)
		case r.Push != nil:
			fmt.Fprintf(&b, "push to %s: version %d", strings.TrimRight(string(r.Push.Incarnation[:]), "\x00"), r.Push.Version)
			if r.Push.Deleted {
				fmt.Fprint(&b, " deleted")
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func describe(s *authority.TenantState) string {
	var b strings.Builder
	if s.Reason != grant.None {
		return s.Reason.String() + "\n"
	}
	o := &s.Ordinary
	fmt.Fprintf(&b, "version %d level %d of %d, outstanding %d of %d, credit %d, decisions %d\n", s.Version, o.Level, o.Burst, o.Outstanding, o.Slack, o.CheckCredit, s.LiveDecisions)
	fmt.Fprintf(&b, "granted %d checked %d expired %d discarded %d\n", o.Granted, o.Checked, o.Expired, o.Discarded)
	for _, w := range o.Owners {
		fmt.Fprintf(&b, "  %s %v holds %d for %v, last grant %d\n", w.Owner, w.State, w.Outstanding, w.ExpiresIn, w.LastGrant)
	}
	for _, p := range o.Parked {
		fmt.Fprintf(&b, "  %s waits with %d for %d to %d since %v, about %v\n", p.Owner, p.ID, p.Min, p.Want, p.Waited, p.Estimate)
	}
	return b.String()
}
