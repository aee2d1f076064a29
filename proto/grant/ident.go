package grant

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"unicode"
	"unicode/utf8"
)

// Limits on identifiers. They bound every key, message and record.
const (
	MaxTenantLen = 256 // bytes of a TenantID
	MaxOwnerLen  = 128 // bytes of an Owner
	MaxClassLen  = 64  // bytes of a RouteClass
	MaxClasses   = 64  // route classes of one policy
	MaxOwners    = 4096
)

// TenantID names who shares one budget. It comes from verified credentials
// only: 1 to MaxTenantLen bytes of UTF-8 without control characters.
type TenantID string

// Validate reports why the id cannot be used, or nil.
func (t TenantID) Validate() error { return validText("tenant", string(t), MaxTenantLen) }

// Owner is a gateway by name (its pod uid, say); many incarnations may bear it
// one after another. 1 to MaxOwnerLen bytes of UTF-8 without control characters.
type Owner string

// Validate reports why the name cannot be used, or nil.
func (o Owner) Validate() error { return validText("owner", string(o), MaxOwnerLen) }

func validText(field, s string, limit int) error {
	switch {
	case s == "":
		return fmt.Errorf("%s: is empty; allowed are 1 to %d bytes", field, limit)
	case len(s) > limit:
		return fmt.Errorf("%s: has %d bytes; allowed are 1 to %d", field, len(s), limit)
	case !utf8.ValidString(s):
		return fmt.Errorf("%s: %q is not valid UTF-8", field, s)
	}
	for _, r := range s {
		if unicode.IsControl(r) {
			return fmt.Errorf("%s: %q holds the control character %U", field, s, r)
		}
	}
	return nil
}

// RouteClass is the whitelisted name of a kind of operation, never a raw URL:
// 1 to MaxClassLen letters, digits, '-', '_' or '.'.
type RouteClass string

// Validate reports why the name cannot be used, or nil.
func (c RouteClass) Validate() error {
	if c == "" || len(c) > MaxClassLen {
		return fmt.Errorf("class: %q has %d bytes; allowed are 1 to %d", shorten(string(c)), len(c), MaxClassLen)
	}
	for i := range len(c) {
		b := c[i]
		if (b < 'a' || b > 'z') && (b < 'A' || b > 'Z') && (b < '0' || b > '9') && b != '-' && b != '_' && b != '.' {
			return fmt.Errorf("class: %q holds %q; allowed are letters, digits, '-', '_' and '.'", string(c), b)
		}
	}
	return nil
}

func shorten(s string) string {
	if len(s) > MaxClassLen {
		return s[:MaxClassLen] + "..."
	}
	return s
}

// Incarnation is one lifetime of an owner's process: 128 random bits. Nothing
// needs it to increase. The zero value names nobody.
type Incarnation [16]byte

// NewIncarnation draws one from the operating system's random source.
func NewIncarnation() Incarnation {
	var i Incarnation
	rand.Read(i[:]) // never fails: crypto/rand ends the process instead
	return i
}

// String is the 32 hexadecimal digits of the incarnation.
func (i Incarnation) String() string { return hex.EncodeToString(i[:]) }

// ParseIncarnation reads the form that String writes.
func ParseIncarnation(s string) (Incarnation, error) {
	var i Incarnation
	if len(s) != 2*len(i) {
		return i, fmt.Errorf("incarnation: %q has %d characters; allowed are %d hexadecimal digits", shorten(s), len(s), 2*len(i))
	}
	if _, err := hex.Decode(i[:], []byte(s)); err != nil {
		return Incarnation{}, fmt.Errorf("incarnation: %q: %w", s, err)
	}
	if i == (Incarnation{}) {
		return i, fmt.Errorf("incarnation: all zero names nobody; draw 128 random bits")
	}
	return i, nil
}

// GrantID numbers the grant requests of one (tenant, incarnation): it counts
// up by one from 1. Zero names no grant.
type GrantID uint64

// Attempt names one admission attempt by the central path.
type Attempt struct {
	Incarnation Incarnation
	Seq         uint64 // counts up from 1 per incarnation; zero names no attempt
}

// Partitions is the number of partitions of a store, fixed for its life.
const Partitions = 64

// Partition is the unit of leadership and order: 0 to Partitions-1.
type Partition uint8

// PartitionOf maps a tenant to its partition: FNV-1a (64 bits) of the id's
// bytes, folded to 32 bits, modulo Partitions. Fixed for the life of a store.
func PartitionOf(t TenantID) Partition {
	const offset, prime = 14695981039346656037, 1099511628211
	h := uint64(offset)
	for i := range len(t) {
		h = (h ^ uint64(t[i])) * prime
	}
	return Partition((h ^ h>>32) % Partitions)
}
