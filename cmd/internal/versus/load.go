package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"sync"
	"time"
)

// decide asks for one decision on behalf of one of the callers and returns when
// it is known to be an allowance.
type decide func(ctx context.Context, caller int, tenant string) error

// tenantName is the id of the nth tenant in both systems.
func tenantName(n int) string { return fmt.Sprintf("tenant-%08d", n) }

// turn is the outcome of one load.
type turn struct {
	Rate     float64 // decisions/s
	P50, P99 float64 // us
	Server   float64 // CPU seconds of the server per 100,000 decisions
	Client   float64 // of this process
	Disk     float64 // bytes the server handed to the disk per decision
	Done     int
}

// load runs callers closed loops for a while, each with tenants drawn evenly
// from names, and measures the server beside it.
func (r *run) load(ctx context.Context, what string, server *child, names []string, ask decide) (t turn, err error) {
	runtime.GC() // of what the turn before left
	before, err := server.usage()
	if err != nil {
		return t, err
	}
	own := ownCPU()
	stopProfile, err := r.profile(what)
	if err != nil {
		return t, err
	}
	latencies := make([][]int64, r.Callers)
	errs := make([]error, r.Callers)
	var all sync.WaitGroup
	start := time.Now()
	end := start.Add(r.Turn)
	for c := range r.Callers {
		all.Go(func() {
			draw := rand.New(rand.NewPCG(uint64(c), 1))
			took := make([]int64, 0, 1<<14)
			for at := time.Now(); at.Before(end); {
				if err := ask(ctx, c, names[draw.IntN(len(names))]); err != nil {
					errs[c] = err
					break
				}
				now := time.Now()
				took = append(took, now.Sub(at).Microseconds())
				at = now
			}
			latencies[c] = took
		})
	}
	all.Wait()
	elapsed := time.Since(start)
	stopProfile()
	own = ownCPU() - own
	after, err := server.usage()
	if err := errors.Join(append(errs, err)...); err != nil {
		return t, fmt.Errorf("%s: %w", what, err)
	}
	took := slices.Concat(latencies...)
	slices.Sort(took)
	t.Done = len(took)
	n := float64(t.Done)
	t.Rate = n / elapsed.Seconds()
	t.P50, t.P99 = float64(quantile(took, 0.5)), float64(quantile(took, 0.99))
	t.Server, t.Client = (after.CPU-before.CPU).Seconds()/n*1e5, own.Seconds()/n*1e5
	t.Disk = float64(after.Written-before.Written) / n
	return t, nil
}

// profile writes a CPU profile of this process until its result is called.
func (r *run) profile(what string) (stop func(), err error) {
	if r.Profile == "" {
		return func() {}, nil
	}
	f, err := os.Create(filepath.Join(r.Profile, what+".pprof"))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { pprof.StopCPUProfile(); _ = f.Close() }, nil
}

// freePort finds a port on loopback for a server that cannot say which it took.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}
