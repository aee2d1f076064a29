package daemon

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
)

// partitionsOf makes n loaded partitions with a drive over a gate, not running.
func partitionsOf(t *testing.T, n int) (parts []*partition, d *drive, g *gate) {
	t.Helper()
	g = &gate{begun: make(chan int), end: make(chan error)}
	for id := range grant.Partition(n) {
		p := newPartition(authority.DefaultConfig(), id, g, machineClock, func(*authority.PolicyPush) {})
		if err := p.load(); err != nil {
			t.Fatal(err)
		}
		parts = append(parts, p)
	}
	return parts, newDrive(machineClock, g.commit, parts...), g
}

// What waits in several partitions is one commit, each partition in it once with
// its own records, and nobody is answered before it has ended.
func TestRoundIsOneCommit(t *testing.T) {
	parts, d, _ := partitionsOf(t, 64)
	a := &answers{got: make(chan struct{}, 256)}
	var commits [][]pebblestore.Part
	d.commit = func(batch []pebblestore.Part) error {
		if n := a.count(); n != 0 {
			t.Errorf("%d answers before the commit", n)
		}
		commits = append(commits, append([]pebblestore.Part(nil), batch...))
		return nil
	}
	if _, err := d.round(); err != nil { // learns when each is due
		t.Fatal(err)
	}
	a.all = nil
	for n, at := range []int{3, 0, 63, 3} {
		parts[at].queue(putCall(a, fmt.Sprintf("t%d", n)))
	}
	d.mark(parts[3].bit | parts[0].bit | parts[63].bit)
	commits = nil
	if _, err := d.round(); err != nil {
		t.Fatal(err)
	}
	if len(commits) != 1 || len(commits[0]) != 3 {
		t.Fatalf("%d commits, the first of %d partitions; want one of three", len(commits), len(commits[0]))
	}
	for i, want := range []grant.Partition{0, 3, 63} {
		if p := commits[0][i]; p.Partition != want || len(p.Records) == 0 {
			t.Errorf("part %d: partition %d with %d records; want partition %d", i, p.Partition, len(p.Records), want)
		}
	}
	if n := a.count(); n != 4 {
		t.Errorf("%d answers after the commit, want 4", n)
	}
	if len(d.batch)+len(d.stepped)+len(d.replies) != 0 {
		t.Error("the round left something behind")
	}
}

// A partition without records does not wait for the commit of the others, and a
// failed commit is told to all whose records were in it.
func TestRoundWithReadsAndAFailure(t *testing.T) {
	parts, d, _ := partitionsOf(t, 3)
	reads, writes := &answers{got: make(chan struct{}, 8)}, &answers{got: make(chan struct{}, 8)}
	broken := errors.New("disk broke")
	d.commit = func([]pebblestore.Part) error {
		if reads.count() != 1 {
			t.Error("the read waits for records that it does not rest on")
		}
		return broken
	}
	parts[0].offer(putCall(writes, "a"))
	parts[1].offer(authority.Call{Caller: reads, Get: &authority.GetTenant{Tenant: "b"}})
	parts[2].offer(putCall(writes, "c"))
	if _, err := d.round(); !errors.Is(err, broken) {
		t.Fatalf("round: %v", err)
	}
	if writes.count() != 2 {
		t.Fatalf("%d of two writers were answered", writes.count())
	}
	for _, r := range writes.all {
		if r.Put.Reason != grant.Unavailable {
			t.Errorf("%s was told %v", r.Put.Tenant, r.Put.Reason)
		}
	}
	parts[2].offer(putCall(writes, "d"))
	if writes.count() != 3 {
		t.Error("who comes after the failure waits for ever")
	}
}

// A mark is never lost: whoever marks a partition while a round runs is stepped
// by the next one, without another call.
func TestMarksDuringARound(t *testing.T) {
	parts, d, g := partitionsOf(t, 2)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.run(ctx) }()
	a := &answers{got: make(chan struct{}, 256)}
	for n := range 50 {
		parts[0].offer(putCall(a, fmt.Sprintf("a%d", n)))
		<-g.begun
		parts[1].offer(putCall(a, fmt.Sprintf("b%d", n)))
		g.end <- nil
		<-g.begun
		g.end <- nil
		<-a.got
		<-a.got
	}
	stop()
	for {
		select {
		case <-g.begun:
			g.end <- nil
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			return
		}
	}
}

// A frame for tenants of many partitions is decided by one round and answered by
// one frame.
func TestRepliesOfARoundShareAFrame(t *testing.T) {
	parts, d, _ := partitionsOf(t, 64)
	d.commit = func([]pebblestore.Part) error { return nil }
	s := newStream("gw", grant.NewIncarnation(), 1024)
	for _, p := range parts {
		p.queue(authority.Call{Caller: s, Get: &authority.GetTenant{Tenant: "x"}})
	}
	d.mark(^uint64(0))
	if _, err := d.round(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.wake:
	default:
		t.Error("the sender is not woken")
	}
	if len(s.queue) != 64 {
		t.Errorf("%d replies are queued when the sender is woken; want 64", len(s.queue))
	}
}
