package sim

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// Fate is how a commit ends.
type Fate uint8

const (
	// Committed: durable, and said so.
	Committed Fate = iota
	// Failed: reported as failed, and nothing of it will ever be there.
	Failed
	// Landed: reported as failed, but the records are there at the next load.
	Landed
)

// ErrCommit is what a commit of fate Failed or Landed reports.
var ErrCommit = errors.New("sim: commit failed or timed out")

// DiskConfig says how the store behaves.
type DiskConfig struct {
	// Latency of one commit, and what is added at random, evenly.
	Latency, Jitter time.Duration
	// UnknownPPM of commits report a failure; half of them landed all the same.
	UnknownPPM int
}

// Disk is the store of all partitions: an authority.Store whose commits take
// virtual time. Not safe for concurrent use.
type Disk struct {
	w       *World
	cfg     DiskConfig
	rng     *rand.Rand
	records map[grant.Partition]map[string][]byte
	writing map[grant.Partition]*write
	next    []Fate // of the next commits, before chance decides
	commits int
	written int // records
}

// write is a commit under way.
type write struct {
	records []authority.Record
	fate    Fate
	done    func(err error, landed bool)
}

var _ authority.Store = (*Disk)(nil)

func newDisk(w *World, cfg DiskConfig) *Disk {
	return &Disk{w: w, cfg: cfg, rng: w.source("disk"), records: make(map[grant.Partition]map[string][]byte), writing: make(map[grant.Partition]*write)}
}

// Load yields what is durable. A commit under way is decided first: once a
// partition was read, nothing older may appear in it.
func (d *Disk) Load(p grant.Partition, yield func(key, value []byte) error) error {
	d.crash(p)
	for _, k := range slices.Sorted(maps.Keys(d.records[p])) {
		if err := yield([]byte(k), bytes.Clone(d.records[p][k])); err != nil {
			return err
		}
	}
	return nil
}

// Commit decides the fate of the records at once, in no time.
func (d *Disk) Commit(p grant.Partition, records []authority.Record) error {
	if d.writing[p] != nil {
		return fmt.Errorf("sim: partition %d has a commit under way", p)
	}
	fate := d.fate()
	if fate != Failed {
		d.apply(p, records)
	}
	if fate != Committed {
		return ErrCommit
	}
	return nil
}

// fate of the next commit: as told, or by chance.
func (d *Disk) fate() (f Fate) {
	switch {
	case len(d.next) > 0:
		f, d.next = d.next[0], d.next[1:]
	case d.cfg.UnknownPPM > 0 && d.rng.IntN(1_000_000) < d.cfg.UnknownPPM:
		f = Failed + Fate(d.rng.IntN(2))
	}
	return f
}

func (d *Disk) apply(p grant.Partition, records []authority.Record) {
	m := d.records[p]
	if m == nil {
		m = make(map[string][]byte)
		d.records[p] = m
	}
	for _, r := range records {
		if r.Value == nil {
			delete(m, string(r.Key))
		} else {
			m[string(r.Key)] = bytes.Clone(r.Value)
		}
	}
	d.commits++
	d.written += len(records)
}

// Next decides the fates of the next commits of any partition.
func (d *Disk) Next(fates ...Fate) { d.next = append(d.next, fates...) }

// begin starts a commit; done is called when it has ended, unless the process
// crashed meanwhile.
func (d *Disk) begin(p grant.Partition, records []authority.Record, done func(err error, landed bool)) {
	wr := &write{records: records, fate: d.fate(), done: done}
	d.writing[p] = wr
	took := d.cfg.Latency
	if d.cfg.Jitter > 0 {
		took += time.Duration(d.rng.Int64N(int64(d.cfg.Jitter)))
	}
	d.w.After(took, func() {
		if d.writing[p] != wr {
			return
		}
		delete(d.writing, p)
		if wr.fate != Failed {
			d.apply(p, wr.records)
		}
		if wr.fate != Committed {
			wr.done(ErrCommit, wr.fate == Landed)
			return
		}
		wr.done(nil, true)
	})
}

// crash decides a commit under way by chance: nobody hears how it ended.
func (d *Disk) crash(p grant.Partition) (landed bool) {
	wr := d.writing[p]
	if wr == nil {
		return false
	}
	delete(d.writing, p)
	if wr.fate == Landed || wr.fate == Committed && d.rng.IntN(2) == 0 {
		d.apply(p, wr.records)
		return true
	}
	return false
}
