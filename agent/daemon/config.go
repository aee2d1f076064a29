package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/stipend/stipend/agent/doors"
	"github.com/stipend/stipend/agent/gate"
	"github.com/stipend/stipend/agent/link"
	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

// Config is everything an agent needs.
type Config struct {
	// Owner is the name of this gateway: a pod's uid, say. Two agents of one
	// name that run at once supersede each other.
	Owner     grant.Owner          `yaml:"owner" help:"name of this gateway, unique among those that run at once"`
	Authority link.Config          `yaml:"authority"`
	Identity  doors.IdentityConfig `yaml:"identity"`
	Proxy     doors.ProxyConfig    `yaml:"proxy"`
	Auth      Auth                 `yaml:"auth"`
	// Routes is the fixed table from method and path to route classes.
	Routes []doors.Route `yaml:"routes"`
	Gate   gate.Config   `yaml:"gate"`
	Record Record        `yaml:"record"`

	// Admin is where /metrics, /healthz, /readyz and /drain are. Nobody is
	// asked who he is there: keep it on loopback, or within the pod.
	Admin string `yaml:"admin" help:"where /metrics, /healthz, /readyz and /drain are; empty: nowhere"`
	// DrainTime bounds a drain: how long held units may be spent. Then the
	// listeners have as long again to finish what is in flight. 0 to 10m.
	DrainTime time.Duration `yaml:"drain_time" help:"most time that a drain takes"`
	// GCPercent is Go's GOGC, 10 to 2000: memory for CPU.
	GCPercent int `yaml:"gc_percent" help:"pace of Go's garbage collector"`
	// MemoryLimit guards GCPercent, in bytes; 0: 80 % of what the machine or
	// the control group allows.
	MemoryLimit int64 `yaml:"memory_limit" conf:"bytes" help:"guard of the collector in bytes; 0: 80 % of what there is"`

	Logger  *slog.Logger    `yaml:"-"` // nil: slog.Default()
	Version string          `yaml:"-"` // of the build
	Ready   func(Addresses) `yaml:"-"` // called once when everything listens
}

// Auth is the forward-auth endpoint.
type Auth struct {
	Listen string `yaml:"listen" help:"where the forward-auth endpoint listens: host:port; empty: nowhere"`
	// Source says where the gateway puts the request that it asks about. It has
	// no default: see doors.Source.
	Source doors.Source `yaml:"source" help:"where the gateway puts the request: x-forwarded (Caddy, Traefik), x-original (nginx) or request (Envoy)"`
	// Prefix is taken off the path when the source is the request itself.
	Prefix string `yaml:"prefix"`
}

// Validate names the field that cannot be used.
func (a Auth) Validate() error {
	if a.Listen == "" && a.Source == "" {
		return nil
	}
	return a.Source.Validate()
}

// Record is the record of admissions for the checker.
type Record struct {
	// Folder gets one file per start of the agent; empty: no record.
	Folder string `yaml:"folder" help:"folder for records of admissions, one file per start; empty: none"`
	// Buffer is how many bytes may wait for the disk; what does not fit is
	// counted as lost, in the file too.
	Buffer int `yaml:"buffer" conf:"bytes"`
	// Every is how often it is written: what a kill may lose.
	Every time.Duration `yaml:"every"`
}

// Validate names the field that cannot be used.
func (r Record) Validate() error {
	return trace.WriterConfig{Buffer: r.Buffer, Every: r.Every, Header: trace.Header{Recorder: "x", Clock: "x"}}.Validate()
}

// Addresses are where an agent listens.
type Addresses struct {
	Proxy, Auth, Admin net.Addr // nil: nowhere
}

// open lists the doors that are there, for the log.
func (a Addresses) open() (attrs []any) {
	for _, door := range []struct {
		name string
		addr net.Addr
	}{{"proxy", a.Proxy}, {"auth", a.Auth}, {"admin", a.Admin}} {
		if door.addr != nil {
			attrs = append(attrs, door.name, door.addr)
		}
	}
	return attrs
}

// DefaultConfig lacks the routes, the identity, and a listener.
func DefaultConfig() Config {
	host, _ := os.Hostname()
	return Config{
		Owner:     grant.Owner(host),
		Authority: link.Defaults(),
		Proxy:     doors.DefaultProxy(),
		Auth:      Auth{Prefix: "/auth"},
		Gate:      gate.Defaults(),
		Record:    Record{Buffer: 4 << 20, Every: 100 * time.Millisecond},
		Admin:     "127.0.0.1:7410",
		DrainTime: 10 * time.Second,
		GCPercent: 400,
	}
}

// Validate names every field that cannot be used; inner structs have their own.
func (c Config) Validate() error {
	var errs []error
	bad := func(ok bool, field string, given any, allowed string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %v; allowed: %s", field, given, allowed))
		}
	}
	if err := c.Owner.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("owner: %w", err))
	}
	if _, err := doors.NewRoutes(c.Routes); err != nil {
		errs = append(errs, err)
	}
	if err := doors.CheckTrust(c.Routes, c.Identity); err != nil {
		errs = append(errs, err)
	}
	bad(c.Proxy.Listen != "" || c.Auth.Listen != "", "proxy.listen", `""`, "an address here or in auth.listen: an agent needs a door")
	bad(c.DrainTime >= 0 && c.DrainTime <= 10*time.Minute, "drain_time", c.DrainTime, "0 to 10m")
	bad(c.GCPercent >= 10 && c.GCPercent <= 2000, "gc_percent", c.GCPercent, "10 to 2000")
	bad(c.MemoryLimit == 0 || c.MemoryLimit >= 16<<20, "memory_limit", c.MemoryLimit, "0, or at least 16 MiB")
	return errors.Join(errs...)
}
