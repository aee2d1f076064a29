package gate

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/link"
	"github.com/stipend/stipend/proto/grant"
)

// Config is everything a gate needs.
type Config struct {
	// Owner is the name of this gateway, unique among those that run at once.
	Owner     grant.Owner `yaml:"-"`
	Authority link.Config `yaml:"-"`

	// Deadline is the longest a request waits for a decision: about ten times
	// the round trip to the authority and its commit. 1ms to 1m.
	Deadline time.Duration `yaml:"deadline" help:"longest wait for a decision"`
	// MaxForwardDelay is d of the bound: the longest time from the start of the
	// attempt to the first byte towards the backend. At least Deadline.
	MaxForwardDelay time.Duration `yaml:"max_forward_delay" help:"longest time from the start of an attempt to the first byte towards the backend"`
	// Tolerance is the largest move between two clocks that is not taken for a
	// step or a sleep. 1ms to 1s.
	Tolerance time.Duration `yaml:"tolerance"`
	// HotPerSecond: tenants with more requests per second than this get grants.
	HotPerSecond int `yaml:"hot_per_second"`
	// LostAfter: emergency grants open when nothing was heard for this long.
	LostAfter time.Duration `yaml:"lost_after"`

	// MaxTenants bounds the tenants with state here. 1 to 4194304.
	MaxTenants int `yaml:"max_tenants"`
	// MaxWaiters bounds the waiting requests of one tenant.
	MaxWaiters int `yaml:"max_waiters"`
	// MaxChecks and MaxChecksPerTenant bound the Checks in flight to the
	// authority, in total and for one tenant.
	MaxChecks          int `yaml:"max_checks"`
	MaxChecksPerTenant int `yaml:"max_checks_per_tenant"`

	Build string       `yaml:"-"` // version of the program, told to the authority
	Log   *slog.Logger `yaml:"-"` // nil: slog's default
	Clock Clock        `yaml:"-"` // zero: the system's
	// Record, when set, is called for each admission, on the goroutine of the
	// request: it must be quick.
	Record func(Admission) `yaml:"-"`
}

// Defaults are sound for an authority within a few milliseconds. The caller
// sets Owner.
func Defaults() Config {
	m := agent.DefaultConfig()
	return Config{
		Authority: link.Defaults(),
		Deadline:  m.Deadline, MaxForwardDelay: 4 * m.Deadline, Tolerance: m.Tolerance,
		HotPerSecond: m.HotPerSecond, LostAfter: m.LostAfter,
		MaxTenants: 100_000, MaxWaiters: m.MaxWaiters, MaxChecks: 4096, MaxChecksPerTenant: 1024,
	}
}

// Validate names every field that cannot be used; Owner and Authority have
// their own.
func (c Config) Validate() error {
	var errs []error
	bad := func(ok bool, field string, given any, allowed string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %v; allowed: %s", field, given, allowed))
		}
	}
	bad(c.Deadline >= time.Millisecond && c.Deadline <= time.Minute, "deadline", c.Deadline, "1ms to 1m")
	bad(c.MaxForwardDelay >= c.Deadline && c.MaxForwardDelay <= time.Hour, "max_forward_delay", c.MaxForwardDelay, "deadline to 1h")
	bad(c.Tolerance >= time.Millisecond && c.Tolerance <= time.Second, "tolerance", c.Tolerance, "1ms to 1s")
	bad(c.HotPerSecond >= 0 && c.HotPerSecond <= 1_000_000, "hot_per_second", c.HotPerSecond, "0 to 1000000")
	bad(c.LostAfter >= 0 && c.LostAfter <= time.Hour, "lost_after", c.LostAfter, "0 to 1h")
	bad(c.MaxTenants >= 1 && c.MaxTenants <= 1<<22, "max_tenants", c.MaxTenants, "1 to 4194304")
	bad(c.MaxWaiters >= 1 && c.MaxWaiters <= 1<<20, "max_waiters", c.MaxWaiters, "1 to 1048576")
	bad(c.MaxChecks >= 1 && c.MaxChecks <= 1<<20, "max_checks", c.MaxChecks, "1 to 1048576")
	bad(c.MaxChecksPerTenant >= 1 && c.MaxChecksPerTenant <= c.MaxChecks, "max_checks_per_tenant", c.MaxChecksPerTenant, "1 to max_checks")
	return errors.Join(errs...)
}
