// Package gate is the decision function that a gateway calls: it keeps the
// machines of package agent, one per tenant, drives them with clocks, timers
// and the link to the authority, and answers one question, Decide.
//
//	g, err := gate.New(cfg)
//	go g.Run(ctx)            // owns every goroutine; wait for it at the end
//	d := g.Decide(ctx, gate.Request{Tenant: "acme", Class: "read", Count: 1})
//	if d.Outcome == agent.Admitted && g.Recheck(d) { forward exactly once }
//	...
//	g.Drain(ctx)             // before the process ends
//
// The caller's duties:
//
//  1. Tenant comes from verified credentials, Class from a fixed list. The gate
//     keeps state for every tenant it is asked about.
//  2. An admitted request is forwarded at most once, and only if Recheck says
//     so right before its first byte goes out.
//  3. One Run per Gate. Before Run and after its end nothing is admitted.
//
// The fast path takes no lock, allocates nothing and makes no system call: one
// time.Now, one look-up in a table whose readers never wait, one
// compare-and-swap in the wallet. Everything else is the slow path, under a
// mutex per tenant.
//
// The road not taken: one goroutine owning all tenants. It would make the slow
// path lock-free to read and a hot tenant's Check flood everybody's delay.
package gate
