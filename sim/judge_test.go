package sim

import (
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// A judge that cannot fail proves nothing: each fault, made by hand, is found.
func TestJudgeFindsFaults(t *testing.T) {
	for name, c := range map[string]struct {
		fault func(w *World, g *Gateway, e *entry)
		want  string
	}{
		"spent what was not credited": {func(w *World, g *Gateway, e *entry) {
			g.decided(e, agent.Decision{Outcome: agent.Admitted, Path: agent.Local, Cost: 1000}, nil, nil)
		}, "was credited"},
		"admitted a Check twice": {func(w *World, g *Gateway, e *entry) {
			a := grant.Attempt{Incarnation: g.inc, Seq: 1 << 40}
			w.Judge.Tenant(acme).checks[a] = checked{at: w.now, cost: 1}
			for range 2 {
				g.decided(e, agent.Decision{Outcome: agent.Admitted, Path: agent.Central, Cost: 1}, &a, nil)
			}
		}, "twice"},
		"admitted a Check that nobody allowed": {func(w *World, g *Gateway, e *entry) {
			g.decided(e, agent.Decision{Outcome: agent.Admitted, Path: agent.Central, Cost: 1}, &grant.Attempt{Incarnation: g.inc, Seq: 1 << 41}, nil)
		}, "never allowed"},
		"credited what was never durable": {func(w *World, g *Gateway, e *entry) {
			for !e.accounts[0].open {
				g.Request(acme, "c", 1, time.Second, nil)
			}
			g.granted(nil, grant.GrantAnswer{Tenant: acme, Incarnation: g.inc, ID: e.accounts[0].sent, Result: grant.Granted, Units: 1, TTL: time.Minute})
		}, "never durable"},
		"deducted without answering": {func(w *World, g *Gateway, e *entry) {
			w.Judge.released(grant.PartitionOf(acme), step{granted: 3}, nil)
		}, "had not been granted before"},
		"answered without deducting": {func(w *World, g *Gateway, e *entry) {
			w.Judge.released(grant.PartitionOf(acme), step{}, []authority.Reply{{Grant: &grant.GrantAnswer{
				Tenant: acme, Incarnation: g.inc, ID: 1 << 42, Result: grant.Granted, Units: 2, TTL: time.Minute}}})
		}, "0 deducted"},
		"more live than N*q": {func(w *World, g *Gateway, e *entry) {
			w.Judge.Tenant(acme).changes = []change{{w.now, policy(0, 100, 1, 0, time.Minute)}}
		}, "N*q is 0"},
		"waits past its deadline": {func(w *World, g *Gateway, e *entry) {
			e.waiters[1<<40] = waiter{deadline: g.now().Mono - 10, pauses: g.pauses}
		}, "after its deadline"},
		"lost an acknowledged decision": {func(w *World, g *Gateway, e *entry) {
			p := grant.PartitionOf(acme)
			for k := range w.Disk.records[p] {
				if k[0] == 'O' || k[0] == 'D' {
					delete(w.Disk.records[p], k)
				}
			}
			w.Center.Crash()
			w.Center.Start()
		}, "deducted twice"}, // found when it is asked for again
		"broke the bound": {func(w *World, g *Gateway, e *entry) {
			c := w.Judge.Tenant(acme)
			for range 400 {
				c.admissions = append(c.admissions, admission{w.now, 1})
			}
		}, "the bound is broken"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, paranoid(50), 1)
			put(t, w, acme, policy(100, 200, 50, 2, time.Minute))
			e := wake(t, w, 0)
			if e.Stats().Held == 0 {
				t.Fatal("nothing is held")
			}
			c.fault(w, w.Gateways()[0], e)
			err := w.Run(10 * time.Millisecond)
			if err == nil {
				err = w.Judge.Close()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the judge says %v, want something with %q", err, c.want)
			}
		})
	}
}
