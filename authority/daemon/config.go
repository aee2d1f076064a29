package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"time"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/authority/membership"
	"github.com/stipend/stipend/authority/pebblestore"
)

// Config is the whole configuration of an authority.
type Config struct {
	// Listen is where agents and operators connect: host:port. Plain text is
	// allowed on loopback only, unless Insecure says that it is meant.
	Listen string `yaml:"listen" help:"where agents and operators connect: host:port"`
	// HTTP is where /metrics, /healthz and /readyz are served; empty: nowhere.
	HTTP string `yaml:"http" help:"where /metrics, /healthz and /readyz are; empty: nowhere"`
	// Data is the folder of the store and of the embedded etcd.
	Data string `yaml:"data" help:"folder of the store and of the embedded etcd"`
	// Init says that this is the first start of a new installation: a store is
	// created. Without it a start never creates one, because a lost disk looks
	// the same and new buckets are full. No setting, a flag to be given once.
	Init bool `yaml:"-"`
	// Insecure allows plain text on addresses that other machines reach.
	Insecure bool `yaml:"insecure" help:"allow plain text on addresses that other machines reach"`
	TLS      TLS  `yaml:"tls"`

	Link   Link              `yaml:"link"`
	Ledger authority.Config  `yaml:"ledger"`
	Etcd   membership.Config `yaml:"etcd"`
	Store  Store             `yaml:"store"`

	// DrainTime bounds a graceful stop: how long agents may take to leave, and
	// unary calls to end. 0 to 5 min.
	DrainTime time.Duration `yaml:"drain_time" help:"most time that a graceful stop takes"`
	// GCPercent is Go's GOGC: 400 saves about a third of the CPU of a gRPC
	// server for memory. 10 to 2000.
	GCPercent int `yaml:"gc_percent" help:"pace of Go's garbage collector"`
	// MemoryLimit guards GCPercent: near it the collector works harder. In
	// bytes; 0: 80 % of what the machine or the control group allows.
	MemoryLimit int64 `yaml:"memory_limit" conf:"bytes" help:"guard of the collector in bytes; 0: 80 % of what there is"`

	Logger  *slog.Logger `yaml:"-"` // nil: slog.Default()
	Version string       `yaml:"-"` // of the build, for metrics
	// Ready is called once when all partitions serve.
	Ready func(Addresses) `yaml:"-"`

	clock clock // nil: machineClock
}

// Addresses are where a daemon listens.
type Addresses struct {
	GRPC net.Addr
	HTTP net.Addr // nil: nowhere
}

// TLS says how connections are protected. The zero value is plain text.
type TLS struct {
	// Cert and Key are the server's PEM files, read again at each handshake.
	Cert string `yaml:"cert" help:"server certificate (PEM); without it: plain text"`
	Key  string `yaml:"key" help:"its key (PEM)"`
	// ClientCA is a PEM file; when set, only clients with a certificate signed
	// by one of its authorities are let in.
	ClientCA string `yaml:"client_ca" help:"who must have signed the clients' certificates (PEM); empty: any client"`
}

// Link bounds what one connection may ask of the daemon.
type Link struct {
	// MaxBatch is the most entries of one frame, either way: 1 to 65536.
	MaxBatch int `yaml:"max_batch"`
	// MaxQueued is how many answers wait for one agent; an agent that reads
	// slower loses its stream. max_batch to 1,048,576.
	MaxQueued int `yaml:"max_queued"`
	// MaxConnections is how many connections are open at once, 1 to 1,000,000.
	MaxConnections int `yaml:"max_connections"`
	// MaxStreams is how many calls one connection has open at once, 1 to 100,000.
	MaxStreams int `yaml:"max_streams"`
	// MaxMessage is the size of a frame from a client in bytes: 64 KiB to 64 MiB.
	MaxMessage int `yaml:"max_message" conf:"bytes"`
}

// Store sizes the store on disk.
type Store struct {
	MemTableBytes int64 `yaml:"mem_table_bytes" conf:"bytes"` // 256 KiB to 1 GiB
	CacheBytes    int64 `yaml:"cache_bytes" conf:"bytes"`     // 1 MiB to 4 GiB
	MinFreeBytes  int64 `yaml:"min_free_bytes" conf:"bytes"`  // below it the authority does not start
	// MarkEvery is how often the store's mark is raised and told to etcd; a copy
	// of the disk that is older is refused. 1 s to 1 h.
	MarkEvery time.Duration `yaml:"mark_every"`
}

// DefaultConfig needs only Data.
func DefaultConfig() Config {
	store := pebblestore.DefaultConfig("")
	return Config{
		Listen: "127.0.0.1:7400",
		HTTP:   "127.0.0.1:7401",
		Link: Link{
			MaxBatch:       1024,
			MaxQueued:      1 << 16,
			MaxConnections: 10_000,
			MaxStreams:     1000,
			MaxMessage:     4 << 20,
		},
		Ledger: authority.DefaultConfig(),
		Etcd:   membership.DefaultConfig(),
		Store: Store{
			MemTableBytes: store.MemTableBytes,
			CacheBytes:    store.CacheBytes,
			MinFreeBytes:  store.MinFreeBytes,
			MarkEvery:     10 * time.Second,
		},
		DrainTime: 5 * time.Second,
		GCPercent: 400,
	}
}

// Validate names every field out of range, what was given and what is allowed.
func (c Config) Validate() error {
	var errs []error
	bad := func(ok bool, field string, given any, allowed string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %v; allowed: %s", field, given, allowed))
		}
	}
	between := func(field string, given, low, high int64) {
		bad(given >= low && given <= high, field, given, fmt.Sprintf("%d to %d", low, high))
	}
	host, _, err := net.SplitHostPort(c.Listen)
	bad(err == nil, "listen", fmt.Sprintf("%q", c.Listen), "host:port")
	if err == nil && c.TLS.Cert == "" {
		bad(c.Insecure || loopback(host), "listen", fmt.Sprintf("%q without tls", c.Listen),
			"a loopback address, or with tls.cert and tls.key, or with insecure: true")
	}
	if c.HTTP != "" {
		_, _, err := net.SplitHostPort(c.HTTP)
		bad(err == nil, "http", fmt.Sprintf("%q", c.HTTP), "host:port, or empty")
	}
	bad(c.Data != "", "data", `""`, "the path of a folder, as in --data ./authority")
	bad((c.TLS.Cert == "") == (c.TLS.Key == ""), "tls.cert", fmt.Sprintf("%q with tls.key %q", c.TLS.Cert, c.TLS.Key), "both or neither")
	bad(c.TLS.ClientCA == "" || c.TLS.Cert != "", "tls.client_ca", fmt.Sprintf("%q", c.TLS.ClientCA), "only with tls.cert and tls.key")
	between("link.max_batch", int64(c.Link.MaxBatch), 1, 1<<16)
	between("link.max_queued", int64(c.Link.MaxQueued), int64(c.Link.MaxBatch), 1<<20)
	between("link.max_connections", int64(c.Link.MaxConnections), 1, 1_000_000)
	between("link.max_streams", int64(c.Link.MaxStreams), 1, 100_000)
	between("link.max_message", int64(c.Link.MaxMessage), 64<<10, 64<<20)
	bad(c.Store.MarkEvery >= time.Second && c.Store.MarkEvery <= time.Hour, "store.mark_every", c.Store.MarkEvery, "1s to 1h")
	bad(c.DrainTime >= 0 && c.DrainTime <= 5*time.Minute, "drain_time", c.DrainTime, "0s to 5m")
	between("gc_percent", int64(c.GCPercent), 10, 2000)
	bad(c.MemoryLimit == 0 || c.MemoryLimit >= 64<<20, "memory_limit", c.MemoryLimit, "0 (80 % of what there is), or at least 67108864 (64 MiB)")
	store := c.store()
	if store.Dir == "" {
		store.Dir = "unset" // told above
	}
	errs = append(errs, under("ledger", c.Ledger.Validate()), under("etcd", c.etcd().Validate()), under("store", store.Validate()))
	return errors.Join(errs...)
}

// under puts the name of a section before every error that was joined.
func under(section string, err error) error {
	if err == nil {
		return nil
	}
	many, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return fmt.Errorf("%s.%w", section, err)
	}
	var out []error
	for _, one := range many.Unwrap() {
		out = append(out, under(section, one))
	}
	return errors.Join(out...)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// etcd is the registry's configuration: embedded beside the store unless
// endpoints are named.
func (c Config) etcd() membership.Config {
	e := c.Etcd
	e.Logger = c.Logger
	if len(e.Endpoints) == 0 {
		e.Dir = filepath.Join(c.Data, "etcd")
	}
	return e
}

func (c Config) store() pebblestore.Config {
	s := pebblestore.DefaultConfig("")
	if c.Data != "" {
		s.Dir = filepath.Join(c.Data, "store")
	}
	s.MemTableBytes, s.CacheBytes, s.MinFreeBytes = c.Store.MemTableBytes, c.Store.CacheBytes, c.Store.MinFreeBytes
	s.Log = c.Logger
	return s
}
