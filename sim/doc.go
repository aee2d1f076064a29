// Package sim is a seeded, deterministic world in virtual time. It runs the real
// authority.Node and the real agent.Tenant with a simulated disk, network,
// clocks and registry of incarnations, breaks all of them on request, and judges
// what happens while it happens.
//
// A World owns one heap of events and one instant, real time in nanoseconds
// since it began. Nothing reads a clock, opens a socket or starts a goroutine;
// every random number comes from a source seeded with the world's seed and the
// name of the component that draws, so that one more draw in one place changes
// nothing in another. The same Config and the same calls give the same Trace,
// byte for byte.
//
// # Who is who
//
//   - Center is the authority's process: one Node per partition in use over one
//     Disk, driven as the daemon drives them.
//   - Disk keeps what was committed, with latency, failures of known and unknown
//     outcome, and crashes that keep or lose the batch under way.
//   - Gateway is one agent's process: the tenants of one incarnation behind a
//     shell that does what the daemon's gate and link do.
//   - Registry stands for etcd: incarnations, leases, and who superseded whom.
//   - Clock is one machine's set of clocks: drift, steps, naps.
//   - Judge records admissions by itself and says what was broken.
//
// # What is judged, always
//
//  1. The bound: bounds.Checker over admissions recorded by the world, a wallet
//     spend at the instant of the reading that Take compared with the expiry, a
//     Check at the instant of the ledger step that deducted it.
//  2. Conservation: no grant id is deducted twice or credited twice, no wallet
//     is credited what was not durably granted to it, and what agents say they
//     spent is what the world saw them admit.
//  3. The sum cap: live balances and grants in flight are at most N*q of the
//     policies in force within one ttl.
//  4. Durability: no reply leaves while its step's records are not committed,
//     and after every load each acknowledged decision is found again.
//  5. Waiters: nobody waits past its deadline.
//
// With Config.Paranoid, Node.Check and Tenant.Check run after every event too.
// Liveness (utilisation, 429 instead of 503) is asked for by the tests, once
// faults have stopped.
//
// # What is not simulated
//
// Memory that lies, disks that lose acknowledged commits, cloned processes, and
// code that is not the pure machines: the gRPC shells and real stores have
// their own tests.
package sim
