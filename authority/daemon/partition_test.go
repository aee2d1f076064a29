package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/membership"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
)

// gate is a store whose commits wait until the test lets them end, with an
// error if it wants.
type gate struct {
	begun chan int // records of a commit that began
	end   chan error
}

func (g *gate) Load(grant.Partition, func(_, _ []byte) error) error { return nil }

func (g *gate) Commit(grant.Partition, []authority.Record) error { panic("only drives commit") }

func (g *gate) commit(parts []pebblestore.Part) error {
	n := 0
	for _, p := range parts {
		n += len(p.Records)
	}
	g.begun <- n
	return <-g.end
}

// answers collects replies.
type answers struct {
	mu  sync.Mutex
	all []authority.Reply
	got chan struct{}
}

func (a *answers) receive(r authority.Reply) {
	a.mu.Lock()
	a.all = append(a.all, r)
	a.mu.Unlock()
	a.got <- struct{}{}
}

func (a *answers) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.all)
}

// gated is a running partition over a gate; ended yields what run returned.
func gated(t *testing.T, maxInbox int) (p *partition, g *gate, ended chan error, stop context.CancelFunc) {
	t.Helper()
	cfg := authority.DefaultConfig()
	cfg.MaxInbox = maxInbox
	g = &gate{begun: make(chan int), end: make(chan error)}
	p = newPartition(cfg, 0, g, machineClock, func(*authority.PolicyPush) {})
	if err := p.load(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended = make(chan error, 1)
	d := newDrive(machineClock, g.commit, p)
	go func() { ended <- d.run(ctx) }()
	return p, g, ended, cancel
}

func putCall(a caller, tenant string) authority.Call {
	return authority.Call{Caller: a, Put: &authority.PutPolicy{Tenant: grant.TenantID(tenant), Policy: slowPolicy(), AnyVersion: true}}
}

// No reply of any kind overtakes the commit it rests on: while one is under way
// calls are taken in, reads too, but nothing is answered; the next batch is one
// commit for all that came meanwhile.
func TestRepliesWaitForTheCommit(t *testing.T) {
	p, g, ended, stop := gated(t, 64)
	a := &answers{got: make(chan struct{}, 64)}
	p.offer(putCall(a, "a"))
	<-g.begun
	for n := range 10 {
		p.offer(putCall(a, fmt.Sprintf("b%d", n)))
	}
	p.offer(authority.Call{Caller: a, Get: &authority.GetTenant{Tenant: "a"}})
	if n := a.count(); n != 0 {
		t.Errorf("%d replies before the commit ended", n)
	}
	g.end <- nil
	<-g.begun // one commit for ten policies
	if n := a.count(); n > 1 {
		t.Errorf("%d replies before the second commit ended; the first one alone was due", n)
	}
	g.end <- nil
	for range 12 {
		<-a.got
	}
	stop()
	select {
	case <-g.begun: // ledger time, at the step down
		g.end <- nil
	case err := <-ended:
		ended <- err
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A failed commit: everybody who waits is told to try again, those who come
// later too, and the drive ends with the error.
func TestFailedCommit(t *testing.T) {
	p, g, ended, stop := gated(t, 64)
	defer stop()
	a := &answers{got: make(chan struct{}, 64)}
	p.offer(putCall(a, "a"))
	<-g.begun
	p.offer(putCall(a, "b"))
	broken := errors.New("disk broke")
	g.end <- broken
	if err := <-ended; !errors.Is(err, broken) {
		t.Errorf("ended with %v", err)
	}
	p.offer(putCall(a, "c"))
	for range 3 {
		<-a.got
	}
	for _, r := range a.all {
		if r.Put.Reason != grant.Unavailable {
			t.Errorf("%s was told %v", r.Put.Tenant, r.Put.Reason)
		}
	}
}

// A change of an incarnation is never lost, however full the inbox is.
func TestMemberChangesAreNotRefused(t *testing.T) {
	p, g, ended, stop := gated(t, 2)
	a := &answers{got: make(chan struct{}, 64)}
	p.offer(putCall(a, "a"))
	<-g.begun // nothing is stepped now
	for n := range 10 {
		p.offer(authority.Call{Caller: a, Member: &authority.Member{Incarnation: grant.Incarnation{byte(n + 1)}, Owner: "gw", State: authority.Live}})
	}
	g.end <- nil
	for range 11 {
		<-a.got
	}
	for n, r := range a.all[1:] {
		if r.Member == nil || r.Member.Reason != grant.None || r.Member.Incarnation[0] != byte(n+1) {
			t.Errorf("change %d: %+v", n, r.Member)
		}
	}
	stop()
	select {
	case <-g.begun:
		g.end <- nil
	case err := <-ended:
		ended <- err
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A change counts as told only when every partition has answered it: a stream's
// welcome and a discard's confirmation wait for that.
func TestSettled(t *testing.T) {
	p, g, ended, stop := gated(t, 64)
	r := newRouter(slog.New(slog.DiscardHandler))
	r.partitions = []*partition{p}
	p.offer(putCall(&answers{got: make(chan struct{}, 1)}, "a"))
	<-g.begun // nothing is stepped now
	inc := grant.Incarnation{1}
	r.changed(authority.Member{Incarnation: inc, Owner: "gw", State: authority.Live})
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.settled(late, inc); !errors.Is(err, context.Canceled) {
		t.Errorf("settled before the partition answered: %v", err)
	}
	g.end <- nil
	if err := r.settled(t.Context(), inc); err != nil {
		t.Error(err)
	}
	if err := r.settled(late, inc); err != nil { // nothing is awaited any more
		t.Error(err)
	}
	p.offer(putCall(&answers{got: make(chan struct{}, 1)}, "b"))
	<-g.begun
	r.changed(authority.Member{Incarnation: inc, Owner: "gw", State: authority.Discarded})
	g.end <- errors.New("disk broke")
	if err := r.settled(t.Context(), inc); err == nil {
		t.Error("settled although the partition failed")
	}
	if err := <-ended; err == nil {
		t.Error("the partition goes on")
	}
	stop()
}

// A store that became the home elsewhere ends this authority at once.
func TestHomeMovedEndsTheDaemon(t *testing.T) {
	cfg := testConfig(t.TempDir())
	ready := make(chan Addresses, 1)
	cfg.Ready = func(a Addresses) { ready <- a }
	ended := make(chan error, 1)
	go func() { ended <- Run(t.Context(), cfg) }()
	<-ready
	other := membership.DefaultConfig()
	other.Endpoints = []string{"unix://" + cfg.Data + "/etcd/" + membership.SocketName}
	r, err := membership.Open(t.Context(), other)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.AdoptHome(t.Context(), membership.Store{Identity: [16]byte{1}, Mark: 1}); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, membership.ErrHomeMoved) {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("goes on serving")
	}
}
