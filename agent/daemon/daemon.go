package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stipend/stipend/agent/doors"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/bounds/trace"
)

const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	maxHeader     = 64 << 10
)

// server is one listener and what it serves.
type server struct {
	http *http.Server
	lis  net.Listener
}

// agent is a running agent.
type agentd struct {
	cfg   Config
	log   *slog.Logger
	gate  *gate.Gate
	door  *doors.Door
	ident *doors.Identity
	proxy *doors.Proxy // nil: none

	writer *trace.Writer // nil: no record
	file   *os.File

	servers []server
	drained sync.Once
	drain   error
}

// Run runs an agent until ctx ends and it is drained. cfg must be valid.
func Run(ctx context.Context, cfg Config) error {
	a := &agentd{cfg: cfg, log: cfg.Logger}
	if a.log == nil {
		a.log = slog.Default()
	}
	setMemory(cfg.GCPercent, cfg.MemoryLimit)
	addrs, err := a.build()
	if err != nil {
		return errors.Join(err, a.close())
	}
	a.log.Info("agent runs", append([]any{"owner", cfg.Owner, "incarnation", a.gate.Incarnation(), "authority", cfg.Authority.Target}, addrs.open()...)...)
	if cfg.Ready != nil {
		cfg.Ready(addrs)
	}
	if err := errors.Join(a.run(ctx), a.close()); err != nil {
		return err
	}
	a.log.Info("stopped", "owner", cfg.Owner)
	return nil
}

// build makes everything and opens the listeners.
func (a *agentd) build() (addrs Addresses, err error) {
	cfg := a.cfg
	gc := cfg.Gate
	gc.Owner, gc.Authority, gc.Build, gc.Log = cfg.Owner, cfg.Authority, cfg.Version, a.log
	if cfg.Record.Folder != "" {
		gc.Record = a.admitted
	}
	if a.gate, err = gate.New(gc); err != nil {
		return addrs, err
	}
	if cfg.Record.Folder != "" {
		if err := a.openRecord(); err != nil {
			return addrs, err
		}
	}
	if a.ident, err = doors.NewIdentity(cfg.Identity); err != nil {
		return addrs, fmt.Errorf("identity: %w", err)
	}
	routes, err := doors.NewRoutes(cfg.Routes)
	if err != nil {
		return addrs, err
	}
	a.door = doors.New(a.gate, a.ident, routes)
	if cfg.Proxy.Listen != "" {
		if a.proxy, err = a.door.Proxy(cfg.Proxy, a.log); err != nil {
			return addrs, fmt.Errorf("proxy: %w", err)
		}
		if addrs.Proxy, err = a.listen("proxy", cfg.Proxy.Listen, a.proxy); err != nil {
			return addrs, err
		}
	}
	if cfg.Auth.Listen != "" {
		h, err := a.door.ForwardAuth(cfg.Auth.Source, cfg.Auth.Prefix)
		if err != nil {
			return addrs, fmt.Errorf("auth: %w", err)
		}
		if addrs.Auth, err = a.listen("auth", cfg.Auth.Listen, h); err != nil {
			return addrs, err
		}
	}
	if cfg.Admin != "" {
		h, err := a.admin()
		if err != nil {
			return addrs, err
		}
		if addrs.Admin, err = a.listen("admin", cfg.Admin, h); err != nil {
			return addrs, err
		}
	}
	return addrs, nil
}

func (a *agentd) listen(field, addr string, h http.Handler) (net.Addr, error) {
	lis, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	a.servers = append(a.servers, server{&http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
	}, lis})
	return lis.Addr(), nil
}

// run drives everything; it ends after ctx, when drained, or at the first error.
func (a *agentd) run(ctx context.Context) error {
	live, stop := context.WithCancel(context.Background())
	defer stop()
	g, broken := errgroup.WithContext(context.Background())
	g.Go(func() error { return a.gate.Run(live) })
	if keys := a.ident.Keys(); keys != nil {
		g.Go(func() error { return keys.Run(live, a.log) })
	}
	if a.writer != nil {
		g.Go(func() error { return a.writer.Run(live) })
	}
	for _, s := range a.servers {
		g.Go(func() error {
			if err := s.http.Serve(s.lis); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve %v: %w", s.lis.Addr(), err)
			}
			return nil
		})
	}
	g.Go(func() error {
		defer stop()
		select {
		case <-ctx.Done():
			a.drainOnce("signal") // logs what fails; there is nothing more to do
		case <-broken.Done():
		}
		end, cancel := context.WithTimeout(context.Background(), a.cfg.DrainTime)
		defer cancel()
		for _, s := range a.servers {
			if s.http.Shutdown(end) != nil {
				s.http.Close()
			}
		}
		return nil
	})
	return g.Wait()
}

// drainOnce drains the gate, because of why; who comes while it drains waits for
// the end of it. The log has one line for its beginning and one for its end.
func (a *agentd) drainOnce(why string) error {
	a.drained.Do(func() {
		a.log.Info("drain begins: no more grants, spending what is held", "because", why, "at_most", a.cfg.DrainTime)
		begin := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), a.cfg.DrainTime)
		defer cancel()
		a.drain = a.gate.Drain(ctx)
		took := time.Since(begin).Round(time.Millisecond)
		if a.drain != nil {
			a.log.Warn("drained, but the authority was not told: the units stay reserved until they expire", "took", took, "err", a.drain)
			return
		}
		a.log.Info("drained: what was held is free", "took", took)
	})
	return a.drain
}

// close releases what build opened.
func (a *agentd) close() error {
	for _, s := range a.servers {
		s.lis.Close() // closed already after a run
	}
	if a.proxy != nil {
		a.proxy.Close()
	}
	if a.file != nil {
		if err := errors.Join(a.writer.Close(), a.file.Close()); err != nil {
			return fmt.Errorf("record: %w", err)
		}
	}
	return nil
}

// openRecord begins a new file: records of two starts never share one.
func (a *agentd) openRecord() error {
	name := fmt.Sprintf("%s-%v.admissions", url.PathEscape(string(a.cfg.Owner)), a.gate.Incarnation())
	f, err := os.OpenFile(filepath.Join(a.cfg.Record.Folder, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	a.file = f
	a.writer, err = trace.NewWriter(f, trace.WriterConfig{
		Header: trace.Header{Recorder: string(a.cfg.Owner), Clock: "monotonic:" + bootID()},
		Buffer: a.cfg.Record.Buffer, Every: a.cfg.Record.Every,
	})
	if err != nil {
		return errors.Join(fmt.Errorf("record: %w", err), f.Close())
	}
	return nil
}

// bootID names the clock: the kernel's monotonic one since this start of the
// machine.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}

func (a *agentd) admitted(ad gate.Admission) {
	r := trace.Record{
		At: ad.Decision.At, Tenant: ad.Tenant, Class: ad.Class, Cost: ad.Decision.Cost, Owner: a.cfg.Owner,
		Path: trace.Path(ad.Decision.Path), Stage: trace.Decision,
	}
	if ad.Decision.Shadow {
		r.Path = trace.Off
	}
	a.writer.Append(r) // a lost record is counted, here and in the file
}

// admin serves the operator's endpoints.
func (a *agentd) admin() (http.Handler, error) {
	metrics, err := a.metrics()
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := a.gate.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		io.WriteString(w, "ready\n")
	})
	// GET as well: the preStop hooks of some orchestrators know no other method.
	drain := func(w http.ResponseWriter, _ *http.Request) {
		if err := a.drainOnce("/drain"); err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		io.WriteString(w, "drained\n")
	}
	mux.HandleFunc("POST /drain", drain)
	mux.HandleFunc("GET /drain", drain)
	return mux, nil
}

// setMemory sets the collector's pace and its guard.
func setMemory(percent int, limit int64) {
	if limit == 0 {
		limit = memoryThere() / 10 * 8
	}
	debug.SetGCPercent(percent)
	if limit > 0 {
		debug.SetMemoryLimit(limit)
	}
}

// memoryThere is the smaller of the machine's memory and the control group's
// limit, in bytes; 0: not known.
func memoryThere() (n int64) {
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		for line := range bytes.Lines(b) {
			if f := bytes.Fields(line); len(f) > 1 && string(f[0]) == "MemTotal:" {
				kib, _ := strconv.ParseInt(string(f[1]), 10, 64)
				n = kib << 10
			}
		}
	}
	if b, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if m, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64); err == nil && (n == 0 || m < n) {
			n = m
		}
	}
	return n
}
