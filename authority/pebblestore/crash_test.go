package pebblestore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

const storeDir = "data/store"

// history is a single caller's life of a store: what it did, and what it was
// told, so that a disk taken at any moment can be judged.
type history struct {
	mu     sync.Mutex
	states []map[string]string // states[n] is the content of all partitions after n commits
	begun  int
	acked  int
	mark   uint64 // acknowledged
	made   bool   // Create returned
	id     Identity
}

func (h *history) note(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
}

// image is a disk as a crash at one moment left it, with what had been
// acknowledged then.
type image struct {
	mem   *vfs.MemFS
	what  string
	begun int // when the image was complete
	acked int // before it was taken
	mark  uint64
	made  bool
}

// photograph makes the disk take an image before every change. A crash before a
// change keeps a random part of what was not synced: none, half or all.
func photograph(d *disk, mem *vfs.MemFS, h *history, out *[]image) {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(3, 4))
	d.on(func(op errorfs.Op) error {
		mu.Lock()
		defer mu.Unlock()
		im := image{what: fmt.Sprintf("change %d (%d of %s)", len(*out), op.Kind, op.Path)}
		h.note(func() { im.acked, im.mark, im.made = h.acked, h.mark, h.made })
		im.mem = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(3) * 50, RNG: rng})
		h.note(func() { im.begun = h.begun })
		*out = append(*out, im)
		return nil
	})
}

// batchOf is the n-th commit: over three partitions, it rewrites a few keys,
// adds a decision and deletes an old one.
func batchOf(n int) (grant.Partition, []authority.Record) {
	value := []byte(fmt.Sprintf("%d:%s", n, strings.Repeat("v", n%200)))
	records := []authority.Record{
		{Key: []byte("B"), Value: value},
		{Key: []byte(fmt.Sprint("O", n%7)), Value: value},
		{Key: []byte(fmt.Sprintf("D%06d", n)), Value: value},
	}
	if n > 30 {
		records = append(records, authority.Record{Key: []byte(fmt.Sprintf("D%06d", n-30))})
	}
	return grant.Partition(n % 3 * 31), records
}

// live creates a store and lives a life of commits with flushes, compactions and
// marks in between; it returns when the life is over or a call failed.
func (h *history) live(cfg Config, commits int, flush bool) error {
	h.states = []map[string]string{{}}
	s, err := Create(cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	h.note(func() { h.made, h.mark, h.id = true, 1, s.Identity() })
	for n := 1; n <= commits; n++ {
		p, records := batchOf(n)
		next := maps.Clone(h.states[n-1])
		for _, r := range records {
			k := fmt.Sprintf("%d/%s", p, r.Key)
			if r.Value == nil {
				delete(next, k)
			} else {
				next[k] = string(r.Value)
			}
		}
		h.note(func() { h.states, h.begun = append(h.states, next), n })
		if err := s.Commit(p, records); err != nil {
			return err
		}
		h.note(func() { h.acked = n })
		switch {
		case n%10 == 5:
			mark, err := s.Advance()
			if err != nil {
				return err
			}
			h.note(func() { h.mark = mark })
		case flush && n%20 == 0:
			if err := s.db.Flush(); err != nil {
				return err
			}
		case flush && n%50 == 1 && n > 1:
			if err := s.db.Compact(context.Background(), []byte{0}, []byte{0xFF}, false); err != nil {
				return err
			}
		}
	}
	return nil
}

func content(s *Store) (map[string]string, error) {
	got := make(map[string]string)
	for p := range grant.Partition(grant.Partitions) {
		if err := s.Load(p, func(k, v []byte) error {
			got[fmt.Sprintf("%d/%s", p, k)] = string(v)
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return got, nil
}

// judge opens the image and returns how many commits it holds.
func (h *history) judge(im image, fs vfs.FS) (commits int, err error) {
	s, err := Open(testConfig(fs, storeDir))
	if err != nil {
		if !im.made && (errors.Is(err, ErrMissing) || errors.Is(err, ErrUnfinished)) {
			return 0, nil
		}
		return 0, err
	}
	defer s.Close()
	if h.made && s.Identity() != h.id {
		return 0, fmt.Errorf("identity %v, want %v", s.Identity(), h.id)
	}
	if s.Mark() < im.mark {
		return 0, fmt.Errorf("mark %d is older than the acknowledged %d", s.Mark(), im.mark)
	}
	got, err := content(s)
	if err != nil {
		return 0, err
	}
	for n := im.acked; n <= im.begun; n++ {
		if maps.Equal(got, h.states[n]) {
			return n, nil
		}
	}
	return 0, fmt.Errorf("the content is that of no moment between commit %d (acknowledged) and %d (begun)", im.acked, im.begun)
}

// TestCrashAtEveryChange: whichever change of the disk a crash comes before,
// and whatever part of the unsynced data survives, the store opens with every
// acknowledged commit and mark, each commit whole, or, before Create returned,
// is refused as missing or unfinished. The same holds for a second crash while
// the store opens after the first.
func TestCrashAtEveryChange(t *testing.T) {
	mem := vfs.NewCrashableMem()
	d := newDisk(mem)
	var h history
	var images []image
	photograph(d, mem, &h, &images)
	if err := h.live(testConfig(d, storeDir), 130, true); err != nil {
		t.Fatal(err)
	}
	if len(images) < 400 || h.acked != 130 {
		t.Fatalf("%d images of %d commits: the life was too short to mean anything", len(images), h.acked)
	}
	again := 0
	for i, im := range images {
		under := newDisk(im.mem)
		var second []image
		if i%8 == 0 {
			photograph(under, im.mem, &history{}, &second)
		}
		n, err := h.judge(im, under)
		if err != nil {
			t.Fatalf("crash before %s: %v", im.what, err)
		}
		for _, im2 := range second {
			// Opening promised nothing new, but it must lose nothing: not even a
			// commit that was not acknowledged, once a reader has seen it.
			im2.acked, im2.begun, im2.mark, im2.made = im.acked, im.begun, im.mark, im.made
			if _, err := h.judge(im2, im2.mem); err != nil {
				t.Fatalf("crash before %s (%d commits), then before %s of the opening: %v", im.what, n, im2.what, err)
			}
			again++
		}
	}
	t.Logf("%d crashes, %d more while opening", len(images), again)
}

// TestErrorAtEveryChange: whichever change of the disk fails, and goes on
// failing or does not, a commit is acknowledged only if it is found again; the
// first failed commit is the last thing the store does, and Fatal hears of it
// exactly once. (A failed sync of the folder ends the process inside Pebble.)
//
// It runs in a process of its own: an Open of Pebble that fails leaves
// goroutines behind.
func TestErrorAtEveryChange(t *testing.T) {
	if os.Getenv(childVariable) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestErrorAtEveryChange$", "-test.v")
		cmd.Env = append(os.Environ(), childVariable+"=leaky")
		if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: TestErrorAtEveryChange")) {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	created, failures := 0, 0
	for at, done := 0, false; !done; at++ {
		for _, sticky := range []bool{false, true} {
			mem := vfs.NewCrashableMem()
			d := newDisk(mem)
			var h history
			var mu sync.Mutex
			seen := 0
			d.on(func(op errorfs.Op) error {
				mu.Lock()
				defer mu.Unlock()
				if op.Path == storeDir && isSync(op.Kind) {
					return nil // Pebble panics in a goroutine of its own
				}
				seen++
				if seen-1 == at || sticky && seen-1 > at {
					return errDisk
				}
				return nil
			})
			cfg := testConfig(d, storeDir)
			heard := 0
			cfg.Fatal = func(error) { h.note(func() { heard++ }) }
			err := h.live(cfg, 20, false)
			if mu.Lock(); seen <= at {
				done = true
			}
			mu.Unlock()
			switch {
			case h.made && err != nil && (!errors.Is(err, ErrFailed) || heard != 1):
				t.Fatalf("change %d: Fatal heard %d times of: %v", at, heard, err)
			case (err == nil || !h.made) && heard != 0:
				t.Fatalf("change %d: Fatal was called and no commit failed", at)
			case err == nil && !done && h.acked != 20:
				t.Fatalf("change %d: %d commits and no error", at, h.acked)
			}
			if h.made {
				created++
			}
			if err != nil {
				failures++
			}
			for _, percent := range []int{0, 50, 100} {
				im := image{acked: h.acked, begun: h.begun, mark: h.mark, made: h.made}
				im.mem = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(uint64(at), 9))})
				if _, err := h.judge(im, im.mem); err != nil {
					t.Fatalf("change %d fails (sticky %v), then a crash that keeps %d %%: %v", at, sticky, percent, err)
				}
			}
		}
	}
	if created < 40 || failures < 40 {
		t.Fatalf("%d stores created, %d failures: too few to mean anything", created, failures)
	}
}

// TestCrashInRecover: a crash at any change of Recover leaves the old store,
// without recovery records, or the recovered one with all of them.
func TestCrashInRecover(t *testing.T) {
	for _, start := range []string{"a store", "nothing"} {
		t.Run(start, func(t *testing.T) {
			mem := vfs.NewCrashableMem()
			var h history
			if start == "a store" {
				if err := h.live(testConfig(mem, storeDir), 40, false); err != nil {
					t.Fatal(err)
				}
			}
			d := newDisk(mem)
			var images []image
			photograph(d, mem, &h, &images)
			header, err := Recover(testConfig(d, storeDir), time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			if header.Identity == h.id || header.Replaces != h.id {
				t.Fatalf("identity %v replaces %v, want a new one that replaces %v", header.Identity, header.Replaces, h.id)
			}
			images = append(images, image{mem: mem.CrashClone(vfs.CrashCloneCfg{}), what: "nothing more"})
			last := false
			for _, im := range images {
				s, err := Open(testConfig(im.mem, storeDir))
				if err != nil && start == "nothing" && (errors.Is(err, ErrMissing) || errors.Is(err, ErrUnfinished)) {
					continue
				}
				if err != nil {
					t.Fatalf("crash before %s: %v", im.what, err)
				}
				want := map[string]string{}
				if start == "a store" {
					want = maps.Clone(h.states[40])
				}
				last = s.Identity() == header.Identity
				if last {
					for p := range grant.Partitions {
						want[fmt.Sprintf("%d/%s", p, RecoveryKey)] = string(RecoveryValue(time.Hour))
					}
					if start == "a store" && s.Mark() <= h.mark {
						t.Fatalf("mark %d after recovery, was %d", s.Mark(), h.mark)
					}
				} else if start == "nothing" || s.Identity() != h.id {
					t.Fatalf("crash before %s: identity %v", im.what, s.Identity())
				}
				got, err := content(s)
				if err != nil {
					t.Fatal(err)
				}
				if !maps.Equal(got, want) {
					t.Fatalf("crash before %s: recovered %v, and the content is not that", im.what, last)
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if !last {
				t.Fatal("the recovery was not durable when Recover returned")
			}
		})
	}
}
