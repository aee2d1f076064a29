package pebblestore

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/stipend/stipend/proto/grant"
)

// loaded is every record of the first n partitions, as "partition/key=value".
func loaded(t *testing.T, s *Store, n int) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for p := range grant.Partition(n) {
		err := s.Load(p, func(k, v []byte) error {
			all[fmt.Sprintf("%d/%s=%s", p, k, v)] = true
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// The parts of a commit are one batch: after a crash at any change of the disk
// all of them are loaded or none, and all of them once it was acknowledged.
func TestPartsAreAllOrNone(t *testing.T) {
	mem := vfs.NewCrashableMem()
	d := newDisk(mem)
	s := mustCreate(t, testConfig(d, "store"))
	acked, rng := 0, rand.New(rand.NewPCG(3, 3))
	type picture struct {
		fs    *vfs.MemFS
		acked int
		what  string
	}
	var pictures []picture
	d.on(func(op errorfs.Op) error {
		for _, unsynced := range []int{0, 50, 100} {
			pictures = append(pictures, picture{mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: unsynced, RNG: rng}), acked, fmt.Sprint(op.Kind, " ", op.Path)})
		}
		return nil
	})
	const commits = 20
	for n := range commits {
		v := fmt.Sprint(n)
		if err := s.CommitParts([]Part{{5, record("k"+v, v)}, {0, record("k"+v, v)}, {63, record("k"+v, v)}}); err != nil {
			t.Fatal(err)
		}
		acked++
	}
	d.on(func(errorfs.Op) error { return nil })
	mustClose(t, s)
	if len(pictures) < 2*commits {
		t.Fatalf("only %d pictures", len(pictures))
	}
	for _, p := range pictures {
		again, err := Open(testConfig(p.fs, "store"))
		if err != nil {
			t.Fatalf("crash before %s after %d commits: %v", p.what, p.acked, err)
		}
		have := loaded(t, again, grant.Partitions)
		for n := range commits {
			count := 0
			for _, part := range []int{0, 5, 63} {
				if have[fmt.Sprintf("%d/k%d=%d", part, n, n)] {
					count++
				}
			}
			if count != 0 && count != 3 || n < p.acked && count != 3 {
				t.Errorf("crash before %s after %d commits: commit %d has %d of 3 parts", p.what, p.acked, n, count)
			}
		}
		mustClose(t, again)
	}
}

// A partition out of range refuses the whole commit, and nothing of it stays.
func TestPartsOutOfRange(t *testing.T) {
	s := mustCreate(t, testConfig(vfs.NewMem(), "store"))
	defer mustClose(t, s)
	if err := s.CommitParts([]Part{{1, record("k", "v")}, {grant.Partitions, record("k", "v")}}); err == nil || errors.Is(err, ErrFailed) {
		t.Errorf("commit to partition %d: %v", grant.Partitions, err)
	}
	if have := loaded(t, s, grant.Partitions); len(have) != 0 {
		t.Errorf("left behind: %v", have)
	}
	if err := s.CommitParts(nil); err != nil {
		t.Errorf("an empty commit: %v", err)
	}
}
