// Package demo runs the whole product on one machine and judges it: one
// authority, three agents as processes of their own, a backend, and load.
//
// The judgement rests on records that the product cannot touch: the backend,
// which lives in this process, notes every request that reaches it with its own
// clock, knows tenants by their API keys and prices by its own table. The
// agents' records of admissions are judged beside it.
//
// Run is the only entry. It owns every goroutine and process that it starts,
// and has ended them all when it returns, also when its context ends.
package demo
