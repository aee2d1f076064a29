// Package agent is what a gateway knows and holds of the tenants it serves: a
// pure machine per tenant, without goroutines, timers, clocks, randomness or
// I/O. Readings of the clocks and messages go in; Effects come out as data.
//
// The caller's duties:
//
//  1. Take and Low may be called at any time from any goroutine. All other
//     methods of one Tenant are serialised by the caller.
//  2. Every request is first offered to Take with a Reading of one time.Now().
//     When Take does not decide, Ask does; a Decision that is Waiting is
//     followed by exactly one Resolution of its ticket, in the Effects of some
//     later call, unless GiveUp ends it before.
//  3. After a Take that admitted, when Low reports true, and at the instant
//     that Wake returns: call Tick. Read Wake anew after every call.
//  4. Effects are sent in the order in which they stand, soon, and only while
//     the link is up; what was not sent before the link went down is sent again
//     by the machine when Link tells that it came up. A new Tenant takes the
//     link for up: tell it when it is not. Slow start is the caller's.
//  5. One sequence (Config.NextSeq) serves every tenant of an incarnation for
//     as long as the incarnation lives, so that a Tenant that was forgotten
//     when Idle and made again never repeats an id: the authority would answer
//     the repeated id with its old grant, and those units are spent already.
//     A new Tenant is told of a Fate that is already known.
//  6. Right before the first byte is forwarded, compare the clocks and the
//     request's deadline once more: the machine cannot see that moment.
//
// What is promised: no unit is spent that was not granted to this incarnation
// and credited once, before its expiry, with clocks that can be trusted; no
// ticket waits past its deadline if Tick is called at Wake; a tenant that is
// over its limit is Denied and not Undecided; every queue is bounded.
//
// Shape: Wallet is the balance and its one atomic step; account is the refill
// machine of one wallet; Tenant decides requests and lets them wait. The
// alternative of a wallet with timers and goroutines inside cannot be tested
// in virtual time and was not taken.
package agent
