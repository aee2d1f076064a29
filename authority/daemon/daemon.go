package daemon

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/stipend/stipend/authority/membership"
	"github.com/stipend/stipend/authority/pebblestore"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// daemon is one running authority.
type daemon struct {
	cfg   Config
	log   *slog.Logger
	clock clock

	registry   *membership.Registry
	store      *pebblestore.Store
	storeName  string
	partitions []*partition
	drive      *drive
	router     *router
	metrics    *metrics
	health     *health.Server
	loaded     atomic.Bool // the fields above are set
	serving    atomic.Bool
	links      sync.WaitGroup // receivers and senders of streams; they outlive their handlers a little
}

// services are those whose health is told one by one.
var services = []string{
	stipendv1.LinkService_ServiceDesc.ServiceName, stipendv1.CheckService_ServiceDesc.ServiceName,
	stipendv1.PolicyService_ServiceDesc.ServiceName, stipendv1.InspectService_ServiceDesc.ServiceName,
}

// draining reports whether the daemon starts, drains or stopped.
func (d *daemon) draining() bool { return !d.serving.Load() }

// Run serves until ctx ends, then drains and returns nil. Any error means that
// it did not start, or that the process must end: a failed commit, etcd gone, or
// another store that became the home.
func Run(ctx context.Context, cfg Config) error {
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	cfg.clock = pick(cfg.clock)
	if err := cfg.Validate(); err != nil {
		return err
	}
	if err := refuseNothing(cfg); err != nil {
		return err
	}
	limit := setMemory(cfg.GCPercent, cfg.MemoryLimit)
	d := &daemon{cfg: cfg, log: cfg.Logger, clock: cfg.clock, router: newRouter(cfg.Logger), metrics: newMetrics(cfg.Version)}
	d.log.Info("authority starts", "version", cfg.Version, "data", cfg.Data, "gc_percent", cfg.GCPercent, "memory_limit", limit)

	server, l, err := d.listen()
	if err != nil {
		return err
	}
	return d.run(ctx, server, l)
}

func pick(c clock) clock {
	if c == nil {
		return machineClock
	}
	return c
}

// open opens etcd and the store and loads the partitions. What it opened is
// closed by close, also after an error.
func (d *daemon) open(ctx context.Context) (err error) {
	if d.registry, err = membership.Open(ctx, d.cfg.etcd()); err != nil {
		return err
	}
	store := d.cfg.store()
	store.OnCommit = d.metrics.committed
	if d.store, err = openStore(ctx, store, d.registry, d.cfg.Init); err != nil {
		return err
	}
	d.storeName = d.store.Identity().String()
	start := time.Now()
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for id := range grant.Partition(grant.Partitions) {
		p := newPartition(d.cfg.Ledger, id, d.store, d.clock, d.router.push)
		d.partitions = append(d.partitions, p)
		g.Go(p.load)
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	d.drive = newDrive(d.clock, d.store.CommitParts, d.partitions...)
	d.router.partitions = d.partitions
	for _, m := range d.registry.Snapshot() {
		d.router.tell(m)
	}
	d.loaded.Store(true)
	s := d.stats()
	d.log.Info("partitions loaded", "store", d.storeName, "tenants", s.Tenants, "took", time.Since(start).Round(time.Millisecond))
	return nil
}

func (d *daemon) close() error {
	var errs []error
	if d.store != nil {
		errs = append(errs, d.store.Close())
	}
	if d.registry != nil {
		errs = append(errs, d.registry.Close())
	}
	return errors.Join(errs...)
}

// listeners are the two sockets; http may be nil.
type listeners struct{ grpc, http net.Listener }

func (d *daemon) listen() (*grpc.Server, listeners, error) {
	var l listeners
	opts, err := d.serverOptions()
	if err != nil {
		return nil, l, err
	}
	inner, err := listen("listen", d.cfg.Listen)
	if err != nil {
		return nil, l, err
	}
	l.grpc = netutil.LimitListener(inner, d.cfg.Link.MaxConnections)
	if d.cfg.HTTP != "" {
		if l.http, err = listen("http", d.cfg.HTTP); err != nil {
			return nil, l, errors.Join(err, l.grpc.Close())
		}
	}
	if host, _, _ := net.SplitHostPort(d.cfg.Listen); d.cfg.TLS.Cert == "" && !loopback(host) {
		d.log.Warn("plain text on an address that other machines reach, as insecure: true says", "listen", d.cfg.Listen)
	}
	server := grpc.NewServer(opts...)
	d.health = health.NewServer()
	d.setServing(false)
	healthpb.RegisterHealthServer(server, d.health)
	stipendv1.RegisterLinkServiceServer(server, &linkService{d: d})
	stipendv1.RegisterCheckServiceServer(server, &checkService{d: d, own: grant.NewIncarnation()})
	stipendv1.RegisterPolicyServiceServer(server, &policyService{d: d})
	stipendv1.RegisterInspectServiceServer(server, &inspectService{d: d})
	reflection.Register(server)
	return server, l, nil
}

// listen opens the socket of a setting, which is also the name of its flag.
func listen(setting, address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s: %w: is another authority running? Stop it, or change --%s", setting, err, setting)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", setting, err)
	}
	return l, nil
}

func (d *daemon) setServing(yes bool) {
	d.serving.Store(yes)
	state := healthpb.HealthCheckResponse_NOT_SERVING
	if yes {
		state = healthpb.HealthCheckResponse_SERVING
	}
	d.health.SetServingStatus("", state)
	for _, s := range services {
		d.health.SetServingStatus(s, state)
	}
}

// windowBytes is what a client may send ahead of the reader, on a stream and on a
// connection: many times what is in flight within a round trip.
const windowBytes = 1 << 20

func (d *daemon) serverOptions() ([]grpc.ServerOption, error) {
	ours := func(method string) bool { return strings.HasPrefix(method, "/stipend.") }
	opts := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(d.cfg.Link.MaxMessage),
		// A fixed window: to find a better one gRPC answers almost every small
		// frame with a ping of its own, which costs a lot and gains nothing here.
		grpc.StaticStreamWindowSize(windowBytes),
		grpc.StaticConnWindowSize(windowBytes),
		// Unary calls on goroutines whose stacks have grown already save a tenth
		// of their CPU; calls beyond that many get goroutines of their own.
		grpc.NumStreamWorkers(256),
		grpc.MaxConcurrentStreams(uint32(d.cfg.Link.MaxStreams)),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 20 * time.Second, Timeout: 5 * time.Second}),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if d.draining() && ours(info.FullMethod) {
				return nil, errDraining()
			}
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if d.draining() && ours(info.FullMethod) {
				return errDraining()
			}
			return next(srv, s)
		}),
	}
	t := d.cfg.TLS
	if t.Cert == "" {
		return opts, nil
	}
	if _, err := tls.LoadX509KeyPair(t.Cert, t.Key); err != nil {
		return nil, fmt.Errorf("tls.cert %s, tls.key %s: %w", t.Cert, t.Key, err)
	}
	tc := &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
			return &pair, err
		},
	}
	if t.ClientCA != "" {
		pem, err := os.ReadFile(t.ClientCA)
		if err != nil {
			return nil, fmt.Errorf("tls.client_ca: %w", err)
		}
		tc.ClientCAs, tc.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		if !tc.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("tls.client_ca: %s holds no certificate in PEM form", t.ClientCA)
		}
	}
	return append(opts, grpc.Creds(credentials.NewTLS(tc))), nil
}

func (d *daemon) httpServer() *http.Server {
	registry := prometheus.NewRegistry()
	registry.MustRegister(append(d.metrics.all, d)...)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if d.draining() {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, "not ready: starting or draining")
			return
		}
		switch status := d.registry.Status(); {
		case status.NoSpace:
			fmt.Fprintln(w, "ready, but etcd is out of space: no agent can register")
		case status.Err != "":
			fmt.Fprintln(w, "ready, but etcd does not answer: no agent can register")
		default:
			fmt.Fprintln(w, "ready")
		}
	})
	return &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: time.Minute}
}

// run listens, opens, and serves until ctx ends or a part fails.
func (d *daemon) run(ctx context.Context, server *grpc.Server, l listeners) error {
	life, stopLife := context.WithCancel(context.Background())
	defer stopLife()
	all, failed := errgroup.WithContext(life)
	web := d.httpServer()
	all.Go(func() error { return ignore(server.Serve(l.grpc), grpc.ErrServerStopped) })
	if l.http != nil {
		all.Go(func() error { return ignore(web.Serve(l.http), http.ErrServerClosed) })
	}
	err := d.open(ctx)
	switch {
	case err == nil:
		d.serve(ctx, server, l, all, life, failed)
	case ctx.Err() != nil:
		d.log.Info("authority was asked to stop while it started", "error", err)
		err = nil
	}
	d.setServing(false)
	server.Stop()
	d.links.Wait()
	web.Close()
	stopLife()
	err = errors.Join(err, all.Wait(), d.close())
	d.log.Info("authority stopped")
	return err
}

// serve starts the parts and returns when they were drained, or one failed.
func (d *daemon) serve(ctx context.Context, server *grpc.Server, l listeners, all *errgroup.Group, life, failed context.Context) {
	work, stopWork := context.WithCancelCause(context.Background())
	all.Go(func() error { return d.registry.Run(life, d.router.changed) })
	all.Go(func() error { return d.keepMark(life) })
	parts := make(chan struct{})
	all.Go(func() error {
		defer close(parts)
		err := d.drive.run(work)
		if err != nil {
			stopWork(errAbrupt) // nothing is decided any more
		}
		return err
	})
	d.setServing(true)
	d.log.Info("authority serves", "grpc", l.grpc.Addr().String(), "http", addrOf(l.http))
	if d.cfg.Ready != nil {
		a := Addresses{GRPC: l.grpc.Addr()}
		if l.http != nil {
			a.HTTP = l.http.Addr()
		}
		d.cfg.Ready(a)
	}
	select {
	case <-ctx.Done():
		d.drain(server, parts, stopWork)
	case <-failed.Done():
		d.log.Error("a part of the authority failed: it stops at once")
	}
	stopWork(errAbrupt)
}

// drain lets agents leave, decides what is queued, and ends calls and streams.
func (d *daemon) drain(server *grpc.Server, parts <-chan struct{}, stopWork context.CancelCauseFunc) {
	d.setServing(false)
	d.log.Info("authority drains", "links", len(d.router.open()), "at_most", d.cfg.DrainTime)
	limit := time.NewTimer(d.cfg.DrainTime)
	defer limit.Stop()
	select {
	case <-d.router.drain():
	case <-limit.C:
	}
	stopWork(nil)
	<-parts // queued calls are decided, parked ones answered, ledger time persisted
	for _, s := range d.router.open() {
		s.end(errDraining())
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.GracefulStop()
	}()
	flush := time.NewTimer(time.Second)
	defer flush.Stop()
	select {
	case <-done:
	case <-flush.C:
		server.Stop() // an agent that does not read its last answers
		<-done
	}
}

func addrOf(l net.Listener) string {
	if l == nil {
		return "nowhere"
	}
	return l.Addr().String()
}

func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}
