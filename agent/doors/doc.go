// Package doors are the ways for HTTP traffic into one decision function: a
// middleware for Go servers, a forward-auth endpoint for nginx, Caddy, Traefik
// and Envoy, and a small reverse proxy.
//
// All of them do the same in the same order: verify the credential (401), match
// method and path to a route class (404), read a trusted count (400), decide
// (429, 503, 403), check once more right before the first byte goes out, and
// forward exactly once. Whoever is not verified leaves no state behind, and what
// matches no route never becomes a key.
package doors
