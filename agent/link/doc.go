// Package link is the one stream of an agent to its authority: it carries
// grant requests and Checks out in batches, and answers, policies, the fate of
// the incarnation and the node's wish to drain in.
//
// The caller's duties:
//
//  1. Run blocks and owns every goroutine; call it once.
//  2. Grant and Check may be called at any time from any goroutine. They never
//     block. What they do not take (a full queue, no stream) the caller learns
//     at once, and nothing was sent then.
//  3. What was taken may still be lost with the stream: Down says so, and the
//     queue is empty afterwards. After Up the caller sends what is still open
//     again, as the same bytes.
//  4. The functions in Events are called one at a time per stream, from the
//     goroutines of Run. They may call Grant and Check, but must not block.
//
// This layer is the only one that retries: it redials with exponential backoff
// and full jitter, so that agents which lost the same authority do not return
// as a herd. After a reconnect one batch is in flight until the first answer
// has come; then the number of entries in flight grows with each answer (slow
// start) until it is no longer a limit. A window on entries, not a rate, lost
// nothing in comparison: the authority's own pace opens it.
//
// A stream counts as lost when something was sent and nothing at all was heard
// for Config.Silence: an authority that accepts and never answers looks like
// that, and so does a network that swallows packets.
package link
