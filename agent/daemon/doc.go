// Package daemon is the agent as a process: a gate, its doors on listeners,
// the record of admissions, metrics and the way to stop.
//
// Run owns everything and returns when its context has ended and the agent is
// drained: listeners stay open while held units are spent, then the wallets are
// discarded, and only then do the listeners close.
package daemon
