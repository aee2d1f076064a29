package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

const (
	// maxInFlight bounds the requests that wait for an answer at once. Past it
	// the load is no longer open: such requests are counted, not sent.
	maxInFlight = 2048
	// downFor is how long a gateway that refused a connection gets no requests,
	// as a load balancer's passive health check does.
	downFor = 250 * time.Millisecond
	// answerWithin bounds one request of the load.
	answerWithin = 10 * time.Second
)

// outcome counts the answers of one role.
type outcome struct {
	sent, ok, limited, undecided, unverified, unrouted, other, broken, skipped atomic.Int64
	offered                                                                    atomic.Int64 // units
}

// load sends the plan's requests through the gateways.
type load struct {
	plan    *plan
	targets []string // host:port of the gateways
	clients []*http.Client
	down    []atomic.Int64 // ns since start until which the gateway gets nothing
	slots   chan struct{}
	start   time.Time
	clock   func() grant.Instant // the backend's

	roles   [numRoles]outcome
	strange atomic.Pointer[string] // the first answer that nothing explains

	mu      sync.Mutex
	reasons map[string]int // of answers 503, by role and reason

	// First refusal of the first tenant for its rate, ns since start; 0: none.
	saturated atomic.Int64
}

func newLoad(p *plan, targets []string, clock func() grant.Instant) *load {
	l := &load{plan: p, clock: clock, targets: targets, down: make([]atomic.Int64, len(targets)), reasons: map[string]int{}, slots: make(chan struct{}, maxInFlight)}
	for range targets {
		dialer := &net.Dialer{Timeout: 2 * time.Second}
		l.clients = append(l.clients, &http.Client{
			Timeout: answerWithin,
			Transport: &http.Transport{
				DialContext: dialer.DialContext, MaxIdleConns: maxInFlight, MaxIdleConnsPerHost: maxInFlight,
				IdleConnTimeout: time.Hour, DisableCompression: true,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		})
	}
	return l
}

// run sends all streams and returns when every request was answered or ctx ended.
func (l *load) run(ctx context.Context, start time.Time) {
	l.start = start
	var streams, requests sync.WaitGroup
	for _, s := range l.plan.streams {
		streams.Go(func() {
			timer := time.NewTimer(0)
			defer timer.Stop()
			for a := range s {
				if wait := a.at - time.Since(start); wait > 0 {
					timer.Reset(wait)
					select {
					case <-ctx.Done():
						return
					case <-timer.C:
					}
				} else if ctx.Err() != nil {
					return
				}
				l.dispatch(ctx, a, &requests)
			}
		})
	}
	streams.Wait()
	requests.Wait()
	for _, c := range l.clients {
		c.CloseIdleConnections()
	}
}

func (l *load) role(a arrival) role {
	if a.tenant < 0 {
		return unverified
	}
	return l.plan.tenants[a.tenant].role
}

func (l *load) dispatch(ctx context.Context, a arrival, requests *sync.WaitGroup) {
	o := &l.roles[l.role(a)]
	o.offered.Add(int64(a.cost))
	select {
	case l.slots <- struct{}{}:
	default:
		o.skipped.Add(1)
		return
	}
	requests.Go(func() {
		defer func() { <-l.slots }()
		l.send(ctx, a, o)
	})
}

// choose is the gateway of a request: the plan's, or the next that is up.
func (l *load) choose(a arrival) int {
	g := l.plan.gateway(a.at, a.draw)
	now := int64(time.Since(l.start))
	for range l.targets {
		if l.down[g].Load() <= now {
			return g
		}
		g = (g + 1) % len(l.targets)
	}
	return g
}

func (l *load) send(ctx context.Context, a arrival, o *outcome) {
	g := l.choose(a)
	req := (&http.Request{
		Method: a.method, URL: &url.URL{Scheme: "http", Host: l.targets[g], Path: a.path, RawPath: a.rawPath},
		Header: http.Header{sentHeader: {strconv.FormatInt(int64(l.clock()), 10)}},
	}).WithContext(ctx)
	key := fmt.Sprintf("unknown-%016x", a.draw)
	if a.tenant >= 0 {
		keys := l.plan.tenants[a.tenant].keys
		key = keys[int(a.draw>>32)%len(keys)]
	}
	req.Header[keyHeader] = []string{key}
	if a.count > 0 {
		req.Header[countHeader] = []string{strconv.FormatInt(a.count, 10)}
	}
	o.sent.Add(1)
	resp, err := l.clients[g].Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return
		}
		o.broken.Add(1)
		if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) {
			l.down[g].Store(int64(time.Since(l.start) + downFor))
		}
		return
	}
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 16<<10))
	resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
		o.ok.Add(1)
	case http.StatusTooManyRequests:
		o.limited.Add(1)
		if a.tenant == 0 {
			l.saturated.CompareAndSwap(0, int64(time.Since(l.start)))
		}
	case http.StatusServiceUnavailable:
		o.undecided.Add(1)
		l.because(l.role(a), body)
	case http.StatusUnauthorized:
		o.unverified.Add(1)
	case http.StatusNotFound:
		o.unrouted.Add(1)
	default:
		o.other.Add(1)
		s := fmt.Sprintf("%s %s: %s", a.method, a.path, resp.Status)
		l.strange.CompareAndSwap(nil, &s)
	}
}

// because counts the reason that a refusal's body gives.
func (l *load) because(r role, body []byte) {
	var problem struct {
		Reason string `json:"reason"`
	}
	if json.Unmarshal(body, &problem) != nil || problem.Reason == "" {
		problem.Reason = "no reason given"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.reasons) < 64 {
		l.reasons[r.String()+": "+problem.Reason]++
	}
}
