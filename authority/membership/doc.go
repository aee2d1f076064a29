// Package membership keeps the incarnations of agents in etcd: who is
// registered under a lease, whose lease ended, and who was superseded,
// discarded or fenced for good. It also remembers which store is at home, so
// that a second node, an empty or replaced disk or a restored backup is told
// from the store that served last. It is the only package of the authority
// that imports etcd.
//
// Nothing here carries the bound. A lease that ends makes an incarnation Lost,
// for people and metrics; it frees no units and refuses nobody. An incarnation
// that comes back under its own id goes on, unless its state is final.
//
// The etcd is embedded by default, with its data in a folder of the caller's.
// The embedded server has no peers and no network listener: this process
// reaches it by function calls, and people reach it with etcdctl through a unix
// socket in the same folder, which only the owner of the folder may enter.
//
// # Keys
//
// All keys lie under Config.Prefix:
//
//	home               the store that serves, and its highest mark seen
//	inc/<incarnation>  owner and fate: "live" until the state is final
//	live/<incarnation> exists while the lease lives; Lost is its absence
//	owner/<name>       the incarnation that bears the name now, unless it is final
//	probe              written to learn whether a full etcd takes writes again
//
// # Invariants, kept by transactions
//
//  1. owner/<name> names an incarnation whose inc record is not final.
//  2. A final inc record never becomes live again. Superseded may become
//     discarded or fenced, which never change. Any may be forgotten (bounded
//     memory).
//  3. live/<i> exists only beside a non-final inc/<i>.
//
// # Duties of the caller
//
//  1. Call Run once, after Open: Register, Discard and Fence return only when
//     Run has handed the change to its callback.
//  2. Close every Session; call Close after Run returned.
//  3. Call CompareHome before serving from a store, then raise the store's mark
//     and call ClaimHome, and do both again every few seconds.
package membership
