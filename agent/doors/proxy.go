package doors

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/proto/grant"
)

// ProxyConfig is the reverse proxy in front of one backend.
type ProxyConfig struct {
	// Listen is where the daemon puts the proxy: host:port; empty: nowhere.
	Listen string `yaml:"listen" help:"where the reverse proxy listens: host:port; empty: nowhere"`
	// Backend is its URL: http or https, host, and an optional path prefix.
	Backend string `yaml:"backend" help:"URL of the backend behind the reverse proxy"`
	// InFlight bounds the requests at the backend at once.
	InFlight int `yaml:"in_flight"`
	// Queue bounds the requests that wait for one of those places, QueueWait
	// how long. Nothing is charged while they wait.
	Queue     int           `yaml:"queue"`
	QueueWait time.Duration `yaml:"queue_wait"`
	// DialTimeout bounds connecting, ResponseTimeout the wait for the
	// response's headers; zero: no bound.
	DialTimeout     time.Duration `yaml:"dial_timeout"`
	ResponseTimeout time.Duration `yaml:"response_timeout"`
	// IdleTimeout closes idle connections to the backend. Keep it below the
	// backend's own: a request is never sent twice, so one that meets a
	// connection which the backend is closing fails with 502.
	IdleTimeout time.Duration `yaml:"idle_timeout"`
}

// DefaultProxy lacks only Backend.
func DefaultProxy() ProxyConfig {
	return ProxyConfig{
		InFlight: 1024, Queue: 1024, QueueWait: time.Second,
		DialTimeout: 2 * time.Second, ResponseTimeout: time.Minute, IdleTimeout: 20 * time.Second,
	}
}

// Validate names every field that cannot be used. Without Listen there may be
// no Backend.
func (c ProxyConfig) Validate() error {
	var errs []error
	bad := func(ok bool, field string, given any, allowed string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %v; allowed: %s", field, given, allowed))
		}
	}
	u, err := url.Parse(c.Backend)
	bad(c.Backend == "" && c.Listen == "" || err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.RawQuery == "", "backend", fmt.Sprintf("%q", c.Backend), "http(s)://host[:port][/path]")
	bad(c.InFlight >= 1 && c.InFlight <= 1<<20, "in_flight", c.InFlight, "1 to 1048576")
	bad(c.Queue >= 0 && c.Queue <= 1<<20, "queue", c.Queue, "0 to 1048576")
	bad(c.QueueWait >= 0, "queue_wait", c.QueueWait, "0 or more")
	bad(c.DialTimeout >= 0, "dial_timeout", c.DialTimeout, "0 (no bound) or more")
	bad(c.ResponseTimeout >= 0, "response_timeout", c.ResponseTimeout, "0 (no bound) or more")
	bad(c.IdleTimeout >= 0, "idle_timeout", c.IdleTimeout, "0 (never) or more")
	return errors.Join(errs...)
}

// places are the bounded in-flight and the bounded queue before it.
type places struct {
	free    chan struct{}
	waiting atomic.Int64
	queue   int64
	wait    time.Duration
}

func (p *places) enter(ctx context.Context) bool {
	select {
	case p.free <- struct{}{}:
		return true
	default:
	}
	if p.waiting.Add(1) > p.queue {
		p.waiting.Add(-1)
		return false
	}
	defer p.waiting.Add(-1)
	t := time.NewTimer(p.wait)
	defer t.Stop()
	select {
	case p.free <- struct{}{}:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

func (p *places) leave() { <-p.free }

var (
	errLate = errors.New("doors: admitted, but too late to forward")
	errOnce = errors.New("doors: forwarded already; a request is never sent twice")
)

// attempt is the one forwarding of an admitted request.
type attempt struct {
	gate     *gate.Gate
	decision agent.Decision
	tenant   grant.TenantID
	begun    atomic.Bool
	late     atomic.Bool
}

// begin is called right before the first byte of the request goes out.
func (a *attempt) begin() error {
	if !a.begun.CompareAndSwap(false, true) {
		return errOnce
	}
	if !a.gate.Recheck(a.decision) {
		a.late.Store(true)
		return errLate
	}
	return nil
}

type attemptKey struct{}

func attemptOf(r *http.Request) *attempt {
	a, _ := r.Context().Value(attemptKey{}).(*attempt)
	return a
}

// backendConn lets an attempt have the last word at the first byte it writes
// to the connection. http.Transport retries some requests on its own, and may
// dial for long between RoundTrip and writing; this is the one place that both
// cannot pass by.
type backendConn struct {
	net.Conn
	next atomic.Pointer[attempt]
}

func (c *backendConn) Write(b []byte) (int, error) {
	if a := c.next.Swap(nil); a != nil {
		if err := a.begin(); err != nil {
			return 0, err
		}
	}
	return c.Conn.Write(b)
}

// once is the transport of the proxy.
type once struct{ transport *http.Transport }

func (o once) RoundTrip(r *http.Request) (*http.Response, error) {
	a := attemptOf(r)
	if a == nil {
		return nil, errOnce
	}
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		c := info.Conn
		if secure, ok := c.(interface{ NetConn() net.Conn }); ok {
			c = secure.NetConn()
		}
		c.(*backendConn).next.Store(a)
	}}
	return o.transport.RoundTrip(r.WithContext(httptrace.WithClientTrace(r.Context(), trace)))
}

// Proxy forwards admitted requests to one backend, each exactly once.
type Proxy struct {
	door   *Door
	places places
	rp     *httputil.ReverseProxy
	idle   func()
}

// Proxy makes a reverse proxy. Close ends its idle connections.
func (d *Door) Proxy(c ProxyConfig, log *slog.Logger) (*Proxy, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	backend, err := url.Parse(c.Backend)
	if err != nil || backend.Host == "" {
		return nil, fmt.Errorf("backend: %q; allowed: a URL", c.Backend)
	}
	dialer := &net.Dialer{Timeout: c.DialTimeout, KeepAlive: 15 * time.Second}
	var protocols http.Protocols
	protocols.SetHTTP1(true) // one request at a time per connection
	t := &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &backendConn{Conn: conn}, nil
		},
		Protocols:             &protocols,
		MaxIdleConns:          c.InFlight,
		MaxIdleConnsPerHost:   c.InFlight,
		IdleConnTimeout:       c.IdleTimeout,
		TLSHandshakeTimeout:   c.DialTimeout,
		ResponseHeaderTimeout: c.ResponseTimeout,
		DisableCompression:    true,
	}
	p := &Proxy{
		door:   d,
		places: places{free: make(chan struct{}, c.InFlight), queue: int64(c.Queue), wait: c.QueueWait},
		idle:   t.CloseIdleConnections,
	}
	p.rp = &httputil.ReverseProxy{
		Transport: once{t},
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.SetURL(backend)
			pr.Out.Host = pr.In.Host
			pr.SetXForwarded()
			if d.identity.header != "" { // never what a stranger wrote there
				pr.Out.Header.Set(d.identity.header, string(attemptOf(pr.In).tenant))
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			d.pass(resp.Header, attemptOf(resp.Request).decision)
			return nil
		},
		ErrorHandler: p.failed,
		ErrorLog:     slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	return p, nil
}

// Close ends the idle connections to the backend.
func (p *Proxy) Close() { p.idle() }

// Queued is the number of requests that wait for a place, Busy of those at the
// backend.
func (p *Proxy) Queued() (waiting, busy int) { return int(p.places.waiting.Load()), len(p.places.free) }

func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	req, ok := p.door.who(w, r, r)
	if !ok {
		return
	}
	// A place first, the decision after it: what is not forwarded for lack of
	// a place is not charged, and the wait does not count against the bound.
	if !p.places.enter(r.Context()) {
		p.door.stats.backendFull.Add(1)
		full := plain(http.StatusServiceUnavailable, "backend-"+grant.Overloaded.String(), "Too many requests wait for the backend. Nothing was charged.")
		full.retryAfter = time.Second
		full.write(w)
		return
	}
	defer p.places.leave()
	dec, ok := p.door.judge(w, r, req)
	if !ok {
		return
	}
	a := &attempt{gate: p.door.gate, decision: dec, tenant: req.Tenant}
	p.rp.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), attemptKey{}, a)))
}

func (p *Proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	if a := attemptOf(r); a != nil && a.late.Load() {
		p.door.tooLate().write(w)
		return
	}
	p.door.stats.backendFailed.Add(1)
	if r.Context().Err() == nil {
		p.rp.ErrorLog.Printf("backend: %v", err)
	}
	plain(http.StatusBadGateway, "backend", "The backend did not answer. The request was charged and is not sent again.").write(w)
}
