package pebblestore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// resum makes the checksum of a changed header right again.
func resum(b []byte) []byte {
	b = bytes.Clone(b)
	binary.BigEndian.PutUint32(b[len(b)-4:], crc32.Checksum(b[:len(b)-4], castagnoli))
	return b
}

func exampleHeader() Header {
	return Header{Identity: Identity{1, 2, 3}, Created: time.Unix(1_700_000_000, 5).UTC(), Replaces: Identity{9}}
}

// TestHeaderRoundTrip: decode gives back what encode was given, and every single
// changed bit is noticed.
func TestHeaderRoundTrip(t *testing.T) {
	want := exampleHeader()
	raw := want.encode()
	got, err := decodeHeader(raw)
	if err != nil || got != want {
		t.Fatalf("decoded %v, %v; want %v", got, err, want)
	}
	for i := range 8 * len(raw) {
		bad := bytes.Clone(raw)
		bad[i/8] ^= 1 << (i % 8)
		if _, err := decodeHeader(bad); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrNewer) {
			t.Fatalf("bit %d changed: %v", i, err)
		}
	}
	for n := range len(raw) {
		if _, err := decodeHeader(raw[:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
}

// TestPartitionHashIsTheNamedOne: the constants in the header are those that
// package grant uses, by values computed apart from it.
func TestPartitionHashIsTheNamedOne(t *testing.T) {
	for tenant, want := range map[grant.TenantID]grant.Partition{
		"":  0x25 ^ 0xcbf29ce4&63,     // the offset basis cbf29ce484222325
		"a": (0x8c ^ 0xaf63dc4c) & 63, // af63dc4c8601ec8c
	} {
		if got := grant.PartitionOf(tenant); got != want&63 {
			t.Errorf("%q is in partition %d, want %d: the layout of every store changed", tenant, got, want&63)
		}
	}
}

// FuzzHeader: no input makes the decoder panic, and what it accepts is what
// encode writes for the same header.
func FuzzHeader(f *testing.F) {
	raw := exampleHeader().encode()
	f.Add(raw)
	f.Add(raw[:20])
	f.Add([]byte("STIPEND\x00\x00\x00\x00\x02and what a later version puts there"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeHeader(b)
		if err == nil && !bytes.Equal(h.encode(), b) {
			t.Fatalf("accepted %x, which encodes as %x", b, h.encode())
		}
		if len(b) > 4 { // let the fuzzer pass the checksum
			if h, err := decodeHeader(resum(b)); err == nil && !bytes.Equal(h.encode(), resum(b)) {
				t.Fatalf("accepted %x, which encodes as %x", resum(b), h.encode())
			}
		}
	})
}

// FuzzMark: the same for the mark.
func FuzzMark(f *testing.F) {
	f.Add(encodeMark(1))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := decodeMark(b); err == nil && !bytes.Equal(encodeMark(m), b) {
			t.Fatalf("accepted %x as %d", b, m)
		}
	})
}
