// Package daemon runs an authority: one owner goroutine per partition that
// drives an authority.Node over the store, the registry of incarnations in
// etcd, the gRPC services of stipend.v1, metrics and health.
//
// # Life
//
// Start: listen, open etcd and the store, compare the store with the home that
// etcd remembers, load all partitions, serve. Until the last step every service
// answers UNAVAILABLE and reports NOT_SERVING. Stop: send Drain to the agents,
// let them go, decide what is queued, answer the parked, persist ledger time,
// close store and etcd.
//
// # Who owns what
//
// A partition's goroutine alone steps its Node. Receivers of streams and unary
// calls only put calls into its inbox, under the partition's lock, which is
// never held during I/O. Replies go to per-stream queues that never block: an
// agent that does not read loses its stream, not the partition its time. One
// sender goroutine per stream merges whatever is queued, from all partitions,
// into few frames.
//
// Changes of incarnations come from the registry in order; the router hands
// each to all partitions and knows when the last has answered. A stream's
// Welcome and a Discarded are sent only then.
//
// A failed commit ends the process: what is on the disk is read by the next one.
package daemon
