// Package bounds states what Stipend promises as numbers, and judges recorded
// admissions against it.
//
// Envelope is the promise as a value: for every real-time interval of length T
//
//	A(T) <= r*(1+rho)*(T+d) + B + N*q
//
// and the figures a planner derives from it. Checker reads admissions in order
// of time, once, and says whether any closed interval broke the promise. Judge
// is one Checker per tenant. Warnings and PromiseOf say which share of the
// rate a policy is promised. docs/bounds.md holds the proof and the assumptions.
//
// The caller of a Checker or Judge must:
//
//  1. give admissions in order of time, all by clocks that differ by at most
//     Config.Skew (resolution of the timestamps included);
//  2. tell every policy change, in order, before any admission later than the
//     change less Skew;
//  3. give every admission that the gateways made: a missing one can only make
//     a broken bound look held.
//
// In return the verdict is exact: integers of 256 bits, no rounding before the
// comparison, and an error instead of an overflow. Everything here is pure and
// not safe for concurrent use.
package bounds
