// Package grant is the vocabulary that the authority, the agents, the bounds
// checker and the simulator share: identifiers, quantities, policies and the
// messages of the grant protocol, as plain Go types.
//
// It imports only the standard library, holds no behaviour beyond validation,
// exact integer arithmetic on rates and the fingerprints of requests, and keeps
// no state. The wire form of the same messages is package stipendv1; the
// conversion between the two lives at the edge, in package wire.
package grant
