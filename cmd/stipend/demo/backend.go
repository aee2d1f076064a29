package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
)

// keyHeader carries the API key; sentHeader when the load sent the request, in
// ns of this process's own clock.
const (
	keyHeader  = "X-Api-Key"
	sentHeader = "Demo-Sent"
)

// forwarded is one request that reached the backend.
type forwarded struct {
	at     grant.Instant // of the backend's own monotonic clock
	sent   grant.Instant // by the load, of the same clock
	tenant int
	cost   grant.Units
}

// backend stands behind the gateways and notes every request that they let
// through. Nothing it knows comes from the product.
type backend struct {
	start  time.Time
	byKey  map[string]int
	prices []map[grant.RouteClass]grant.Class
	table  *table
	server *http.Server
	listen net.Listener

	mu      sync.Mutex
	records []forwarded
	units   []grant.Units // by tenant
	all     grant.Units
	strange int    // requests that no plan sends: a gateway let something through that it must not
	first   string // the first of them
	live    *bounds.Checker
	liveErr error
}

// startBackend listens on loopback; run serves.
func startBackend(p *plan, addr string, live *bounds.Checker) (*backend, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("backend: %w", err)
	}
	b := &backend{
		start: time.Now(), byKey: map[string]int{}, table: newTable(p.routes), listen: l,
		records: make([]forwarded, 0, 1<<16), units: make([]grant.Units, len(p.tenants)), live: live,
	}
	for i, t := range p.tenants {
		for _, k := range t.keys {
			b.byKey[k] = i
		}
		b.prices = append(b.prices, t.policy.Classes)
	}
	// Idle connections outlive those of the gateways' pools: a request is never
	// sent twice, so one that met a closing connection would be lost.
	b.server = &http.Server{Handler: b, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Hour}
	return b, nil
}

func (b *backend) addr() string { return b.listen.Addr().String() }

// run serves until ctx ends.
func (b *backend) run(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		<-ctx.Done()
		b.server.Close()
	}()
	err := b.server.Serve(b.listen)
	<-done
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

func (b *backend) now() grant.Instant { return grant.Instant(time.Since(b.start)) }

// ServeHTTP notes the request and answers it.
func (b *backend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tenant, known := b.byKey[r.Header.Get(keyHeader)]
	cost, err := b.price(tenant, known, r)
	sent, bad := strconv.ParseInt(r.Header.Get(sentHeader), 10, 64)
	if err == nil && bad != nil {
		err = fmt.Errorf("%s %s with %s %q", r.Method, r.URL.Path, sentHeader, r.Header.Get(sentHeader))
	}

	b.mu.Lock()
	if err != nil {
		b.strange++
		if b.first == "" {
			b.first = err.Error()
		}
	} else {
		at := b.now()
		b.records = append(b.records, forwarded{at, grant.Instant(sent), tenant, cost})
		b.units[tenant] += cost
		b.all += cost
		if tenant == 0 && b.live != nil {
			b.liveErr = b.live.Admit(at, cost)
		}
	}
	b.mu.Unlock()
	w.Header().Set("Content-Type", "text/plain")
	w.Write([]byte("ok\n"))
}

func (b *backend) price(tenant int, known bool, r *http.Request) (grant.Units, error) {
	if !known {
		return 0, fmt.Errorf("%s %s with a key that stands for nobody", r.Method, r.URL.Path)
	}
	route, ok := b.table.of(r.Method, r.URL, r.Host)
	if !ok {
		return 0, fmt.Errorf("%s %s, which is no route", r.Method, r.URL.Path)
	}
	count := int64(1)
	if route.counted {
		n, err := strconv.ParseInt(r.Header.Get(countHeader), 10, 64)
		if err != nil || n < 0 {
			return 0, fmt.Errorf("%s %s with %s %q", r.Method, r.URL.Path, countHeader, r.Header.Get(countHeader))
		}
		count = n
	}
	cost, fits := grant.MulUnits(b.prices[tenant][route.class].Cost, grant.Units(count))
	if !fits {
		return 0, fmt.Errorf("%s %s with a count of %d", r.Method, r.URL.Path, count)
	}
	return cost, nil
}

// soFar is units of the first tenant and of all, and the first one's largest
// excess over r*T.
func (b *backend) soFar() (first, all, excess grant.Units) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.live != nil && b.liveErr == nil {
		if v, err := b.live.Verdict(); err == nil {
			excess = v.Excess
		}
	}
	return b.units[0], b.all, excess
}

// taken is everything noted.
func (b *backend) taken() (records []forwarded, strange int, first string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]forwarded(nil), b.records...), b.strange, b.first
}
