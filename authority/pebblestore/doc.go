// Package pebblestore keeps the records of all partitions on one machine's
// disk: authority.Store over Pebble, with a synced write-ahead log.
//
// # What a caller must do
//
//  1. Call Create once, by an explicit decision of an operator, and Open from
//     then on. A folder that Open refuses is never repaired by Create.
//  2. Compare Identity with the home that the cluster remembers, and Mark with
//     the largest mark that the cluster remembers, before serving: a smaller
//     Mark means that this disk is a copy older than the one that served. Then
//     call Advance, and let the cluster remember the new mark by a
//     compare-and-swap, before the first commit and every few seconds after.
//  3. Make one call per partition at a time; different partitions may call at
//     once, and their commits share one write of the log.
//  4. Let the process end when a commit fails. Config.Fatal does so by default.
//  5. Call Close once, after the last call has returned.
//
// # What is promised
//
// A nil from Commit means that all of its records are on disk, synced, and will
// be loaded by every later Open of this disk. Every batch is loaded whole or not
// at all. Nothing of a folder is used that this version does not understand.
//
// # Why a failed commit ends the process
//
// Pebble shows a batch to readers before the log is synced, and a failed sync
// says nothing about what reached the disk: the pages may be lost while the
// kernel calls them clean. So neither the memory of this process nor a read of
// the open database can be trusted after a failure. The store remembers the
// failure for good (every later Commit, Load and Advance fails), tells
// Config.Fatal, and start-up reads what the disk really holds. The alternative,
// closing and reopening inside the process, would have to stop callers that may
// be stuck inside Pebble's commit pipeline.
package pebblestore
