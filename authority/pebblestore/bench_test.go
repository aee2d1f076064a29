package pebblestore

import (
	"encoding/binary"
	"fmt"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// benchRecords are of the size of one grant: a bucket and an owner rewritten, a
// decision written and an old one deleted.
func benchRecords(n uint64) []authority.Record {
	key := func(kind byte, id uint64) []byte {
		return binary.BigEndian.AppendUint64([]byte{kind}, id)
	}
	return []authority.Record{
		{Key: key('B', n%1000), Value: make([]byte, 40)},
		{Key: key('O', n%1000), Value: make([]byte, 60)},
		{Key: key('D', n), Value: make([]byte, 48)},
		{Key: key('D', n-1000)},
	}
}

// parallel runs b.N commits by callers goroutines, each of its own partition,
// and reports commits/s.
func parallel(b *testing.B, callers int, commit func(p grant.Partition, n uint64) error) {
	var all sync.WaitGroup
	b.ResetTimer()
	for c := range callers {
		all.Go(func() {
			for i := c; i < b.N; i += callers {
				if err := commit(grant.Partition(c), uint64(1000+i)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commits/s")
}

// BenchmarkCommit is durable commits through the store, in a real folder.
func BenchmarkCommit(b *testing.B) {
	for _, callers := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			cfg := testConfig(nil, b.TempDir())
			cfg.MemTableBytes, cfg.CacheBytes = DefaultConfig("").MemTableBytes, DefaultConfig("").CacheBytes
			s := mustCreate(b, cfg)
			parallel(b, callers, func(p grant.Partition, n uint64) error { return s.Commit(p, benchRecords(n)) })
			st := s.Stats()
			b.ReportMetric(float64(st.LogBytes+st.Written)/float64(st.CommitBytes), "write-amp")
			mustClose(b, s)
		})
	}
}

// BenchmarkRawBatch is the peer: the same batches by Pebble alone, with its
// defaults. Grants per second are measured against it.
func BenchmarkRawBatch(b *testing.B) {
	for _, callers := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			db, err := pebble.Open(b.TempDir(), &pebble.Options{Logger: engineLogger{&Store{log: testConfig(nil, "").Log}}, FormatMajorVersion: pebble.FormatNewest})
			if err != nil {
				b.Fatal(err)
			}
			parallel(b, callers, func(p grant.Partition, n uint64) error {
				batch := db.NewBatch()
				for _, r := range benchRecords(n) {
					key := append([]byte{byte(p)}, r.Key...)
					if r.Value == nil {
						err = batch.Delete(key, nil)
					} else {
						err = batch.Set(key, r.Value, nil)
					}
					if err != nil {
						return err
					}
				}
				return batch.Commit(pebble.Sync)
			})
			if err := db.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
