package membership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// SocketName is the unix socket in the embedded server's folder, for etcdctl.
const SocketName = "etcd.sock"

// maxSocketPath is what the kernel allows in sun_path, less the final zero.
const maxSocketPath = 107

// startTimeout bounds the start of the embedded server: a log of some hundred
// megabytes is replayed in seconds.
const startTimeout = 60 * time.Second

// server is an embedded etcd and the means to quiet its first and last words.
type server struct {
	etcd  *embed.Etcd
	phase *atomic.Int32 // starting, serving or closing
	lock  *os.File      // closing it unlocks the folder
}

const (
	starting = iota // warnings are about how etcd is set up here: debug lines
	serving
	closing // warnings and errors are about closed listeners: debug lines
)

// startEmbedded starts the server in dir and returns a client that calls it
// without a socket.
func startEmbedded(ctx context.Context, dir string, quota int64, log *slog.Logger) (*server, *clientv3.Client, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("embedded etcd: data folder: %w", err)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("embedded etcd: data folder: %w", err)
	}
	// etcd would wait for the other process for ever, and the socket below
	// would be taken from under it.
	lock, err := lockFolder(abs)
	if err != nil {
		return nil, nil, err
	}
	s := &server{phase: new(atomic.Int32), lock: lock}
	defer func() {
		if s.etcd == nil {
			lock.Close()
		}
	}()
	cfg := embed.NewConfig()
	cfg.Name = "stipend"
	cfg.Dir = abs
	// A single member never dials itself, and nobody else may: the peer URL is
	// a name in the membership record, not an address.
	cfg.ListenPeerUrls = nil
	cfg.AdvertisePeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:1"}}
	cfg.ListenClientUrls = nil
	cfg.AdvertiseClientUrls = nil
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	socket := filepath.Join(abs, SocketName)
	if len(socket) <= maxSocketPath {
		// A socket left by a killed process would refuse the new one.
		if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
			return nil, nil, fmt.Errorf("embedded etcd: stale socket: %w", err)
		}
		u := url.URL{Scheme: "unix", Path: socket}
		cfg.ListenClientUrls = []url.URL{u}
		cfg.AdvertiseClientUrls = []url.URL{u}
	} else {
		cfg.AdvertiseClientUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:1"}}
		log.Info("embedded etcd: no socket for etcdctl: its path would be too long", "path", socket)
	}
	cfg.EnableGRPCGateway = false
	cfg.QuotaBackendBytes = quota
	cfg.AutoCompactionMode = embed.CompactorModePeriodic
	cfg.AutoCompactionRetention = "1h"
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(&slogCore{log: log, phase: s.phase}))
	if s.etcd, err = embed.StartEtcd(cfg); err != nil {
		return nil, nil, fmt.Errorf("embedded etcd: start in %s: %w", abs, err)
	}
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case <-s.etcd.Server.ReadyNotify():
	case err = <-s.etcd.Err():
	case <-s.etcd.Server.StopNotify():
		err = fmt.Errorf("stopped while starting")
	case <-timer.C:
		err = fmt.Errorf("not ready after %v", startTimeout)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		s.close()
		return nil, nil, fmt.Errorf("embedded etcd: start in %s: %w", abs, err)
	}
	s.phase.Store(serving)
	return s, v3client.New(s.etcd.Server), nil
}

func (s *server) close() {
	s.phase.Store(closing)
	s.etcd.Close()
	s.lock.Close()
}

// lockFolder makes this process the only one that runs an etcd in dir.
func lockFolder(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("embedded etcd: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("embedded etcd: %w: %s", ErrInUse, dir)
	}
	return f, nil
}

// ErrInUse says that another process runs an etcd in the same folder.
var ErrInUse = errors.New("another authority runs in this folder")

// slogCore is etcd's log at warn level and above on a slog logger.
type slogCore struct {
	log    *slog.Logger
	phase  *atomic.Int32
	fields []zapcore.Field
}

func (c *slogCore) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

func (c *slogCore) With(f []zapcore.Field) zapcore.Core {
	return &slogCore{c.log, c.phase, append(c.fields[:len(c.fields):len(c.fields)], f...)}
}

func (c *slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c *slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	level := slog.LevelWarn
	if e.Level >= zapcore.ErrorLevel {
		level = slog.LevelError
	}
	phase := c.phase.Load()
	if phase == starting && e.Level == zapcore.WarnLevel || phase == closing && e.Level <= zapcore.ErrorLevel {
		level = slog.LevelDebug
	}
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range c.fields {
		f.AddTo(enc)
	}
	for _, f := range fields {
		f.AddTo(enc)
	}
	c.log.Log(context.Background(), level, "etcd: "+e.Message, "fields", enc.Fields)
	return nil
}

func (c *slogCore) Sync() error { return nil }
