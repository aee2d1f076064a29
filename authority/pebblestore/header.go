package pebblestore

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Format is the version of the layout that this package writes and the only one
// that it reads. A change of the key space or of the header raises it.
const Format = 1

// PartitionHash names the map from tenants to partitions that a store is built
// on: FNV-1a of 64 bits, folded to 32 (grant.PartitionOf).
const PartitionHash = "fnv1a64/fold32"

// Identity names a store: 128 random bits drawn when it was created or
// recovered. The zero value names none.
type Identity [16]byte

// String is the 32 hexadecimal digits of the identity.
func (i Identity) String() string { return hex.EncodeToString(i[:]) }

func newIdentity() Identity {
	var i Identity
	rand.Read(i[:]) // never fails: crypto/rand ends the process instead
	return i
}

// Header is what a store says of itself. It is written and synced at creation
// before anything else, and replaced only by Recover.
type Header struct {
	Identity Identity
	Created  time.Time // wall time of creation or recovery, for people
	Replaces Identity  // the identity that Recover took from this store; zero: none
}

// The key space. A record of partition p has the key p, record key. The store's
// own keys begin with metaSpace, above every partition.
const metaSpace = 0xFF

var (
	headerKey = []byte{metaSpace, 'h'}
	markKey   = []byte{metaSpace, 'm'}
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var headerMagic = []byte("STIPEND\x00")

// encode writes: magic (8), format (4), identity (16), created (8, nanoseconds
// since 1970), replaces (16), partitions (2), length of the hash's name (1), the
// name, CRC-32C of all before (4); integers are big-endian.
func (h Header) encode() []byte {
	b := bytes.Clone(headerMagic)
	b = binary.BigEndian.AppendUint32(b, Format)
	b = append(b, h.Identity[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(h.Created.UnixNano()))
	b = append(b, h.Replaces[:]...)
	b = binary.BigEndian.AppendUint16(b, grant.Partitions)
	b = append(b, byte(len(PartitionHash)))
	b = append(b, PartitionHash...)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// decodeHeader reads what encode wrote. Its error is ErrNewer for a later
// format, ErrConstants for other partition constants, else ErrCorrupt.
func decodeHeader(b []byte) (Header, error) {
	const fixed = 8 + 4 + 16 + 8 + 16 + 2 + 1
	var h Header
	rest, found := bytes.CutPrefix(b, headerMagic)
	if !found || len(rest) < 4 {
		return h, fmt.Errorf("%w: the header of %d bytes does not begin as one", ErrCorrupt, len(b))
	}
	// The format is read first: what follows it, checksum included, belongs to it.
	if f := binary.BigEndian.Uint32(rest); f > Format {
		return h, fmt.Errorf("%w: format %d; this version reads %d: run the newer version that wrote it", ErrNewer, f, Format)
	} else if f != Format {
		return h, fmt.Errorf("%w: format %d; allowed: %d", ErrCorrupt, f, Format)
	}
	if len(b) < fixed+4 || len(b) != fixed+int(b[fixed-1])+4 {
		return h, fmt.Errorf("%w: the header has %d bytes", ErrCorrupt, len(b))
	}
	body, sum := b[:len(b)-4], binary.BigEndian.Uint32(b[len(b)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return h, fmt.Errorf("%w: the header's checksum does not match", ErrCorrupt)
	}
	rest = body[12:]
	h.Identity = Identity(rest[:16])
	h.Created = time.Unix(0, int64(binary.BigEndian.Uint64(rest[16:]))).UTC()
	h.Replaces = Identity(rest[24:40])
	partitions, hash := binary.BigEndian.Uint16(rest[40:]), string(rest[43:])
	if partitions != grant.Partitions || hash != PartitionHash {
		return h, fmt.Errorf("%w: %d partitions by %q; this version has %d by %q: tenants would be looked for in the wrong partition",
			ErrConstants, partitions, hash, grant.Partitions, PartitionHash)
	}
	if h.Identity == (Identity{}) {
		return h, fmt.Errorf("%w: the identity is zero", ErrCorrupt)
	}
	return h, nil
}

// encodeMark writes the mark (8, big-endian) and its CRC-32C.
func encodeMark(m uint64) []byte {
	b := binary.BigEndian.AppendUint64(nil, m)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func decodeMark(b []byte) (uint64, error) {
	if len(b) != 12 || crc32.Checksum(b[:8], castagnoli) != binary.BigEndian.Uint32(b[8:]) {
		return 0, fmt.Errorf("%w: the mark of %d bytes", ErrCorrupt, len(b))
	}
	m := binary.BigEndian.Uint64(b)
	if m == 0 {
		return 0, fmt.Errorf("%w: the mark is zero", ErrCorrupt)
	}
	return m, nil
}

// RecoveryKey is the record key under which Recover leaves, in every partition,
// how long no grants may be made: RecoveryValue. Load yields it as any record;
// the ledger that finds it starts every bucket at level 0, withholds grants that
// long, and rewrites or deletes it by its first commit.
const RecoveryKey = "R"

// RecoveryValue is the duration in nanoseconds, 8 bytes, big-endian.
func RecoveryValue(noGrantsFor time.Duration) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(noGrantsFor))
}
