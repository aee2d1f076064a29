// Package authority is the pure core of the central authority: the Ledger, a
// state machine that holds one token bucket per tenant and durably deducts
// grants and Checks from it, and the Node, the one step that drives a Ledger in
// the daemon and in the simulator alike.
//
// Neither has a goroutine, a clock, a lock, I/O or a random source. Requests and
// clock readings go in; records to persist, replies and the next wake-up come
// out. Neither is safe for concurrent use.
//
// # What the shell owes
//
//  1. One Node per partition and one Store per Node; nobody else writes there.
//  2. Load before anything else, and again after a failed commit, with fresh
//     clock readings; then one Member call for every incarnation that is not gone.
//  3. Offer calls at any time; send the refusal of a full inbox at once.
//  4. Step when a call waits or Wake has come. Commit the records it returns,
//     all or none, and only then call Done; never Step in between.
//  5. Deliver Replies in order. Nothing else may be sent.
//  6. Close before handing the partition over, and commit what it returns.
//
// # What is promised
//
// For every tenant with rate r, burst B and at most N owners that hold at most q
// units each, over every interval of T seconds of real time: what grants and
// Checks admit is at most r*(1+rho)*T + B + N*q. The invariants that carry this
// are listed at Ledger and tested by Ledger.Check. No reply leaves before every
// record that was stepped before it is durable. A refusal changes nothing but
// time. What a call costs does not depend on how many tenants there are.
//
// # What is not promised
//
// The Ledger does not know whether an agent lives: it counts what an incarnation
// may still spend until that has expired. It does not wait for anybody: a caller
// whose reply was lost asks again with the same id.
package authority
