package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/stipend/stipend/authority/daemon"
	"github.com/stipend/stipend/cmd/internal/conf"
	"github.com/stipend/stipend/proto/grant"
)

const recoverConsequences = `What recover does to %[1]s:

  * The store there becomes the home, whatever it held before. An empty or missing
    folder becomes a new store: without policies, so every tenant is refused until
    you apply them again (stipend policy apply -f FILE).
  * A restored backup keeps its policies and records as they were when it was made.
    What was spent since then is not in it.
  * All buckets start empty: no tenant gets back its burst at once.
  * Nothing is granted for %[2]s, and requests are checked one by one: gateways may
    still hold units that this store does not know of. This must be at least the
    longest ttl of any policy that was ever in force, or the bound may break.
  * If the old disk comes back, the authority refuses to serve from it.

The authority must be stopped.
`

func newRecover(o *output) *cobra.Command {
	var config, data string
	var yes bool
	wait := durationFlag(0)
	c := &cobra.Command{
		Use:   "recover",
		Short: "Make the store on this disk the home after a loss, with the authority stopped",
		Long: `After a disk was lost, replaced or restored from a backup, the authority refuses
to serve from it: it cannot know what was granted meanwhile. recover says that you
accept the consequences, which it prints, and changes nothing without --yes.

Run it on the authority's machine, with the authority's own configuration.`,
		Example: `  stipend recover --config authority.yaml --no-grants-for 1m          only say what would happen
  stipend recover --config authority.yaml --no-grants-for 1m --yes`,
		Args: exactly(0, "flags only"),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg := daemon.DefaultConfig()
			from := conf.Sources{Env: os.Environ(), Flags: map[string]string{}}
			if data != "" {
				from.Flags["data"] = data
			}
			if config == "" && data == "" {
				return badInputf("no store is named; give the authority's --config FILE, or its --data FOLDER")
			}
			if err := conf.Load(config, &cfg, from); err != nil {
				return badInput(err)
			}
			cfg.Logger = slog.New(slog.DiscardHandler) // what matters is said below
			if time.Duration(wait) < grant.MinTTL || time.Duration(wait) > grant.MaxTTL {
				return badInputf("--no-grants-for: %s; allowed: %v to %v, and at least the longest ttl of any policy that was ever in force", wait.String(), grant.MinTTL, grant.MaxTTL)
			}
			dir := cfg.Data
			if abs, err := filepath.Abs(dir); err == nil {
				dir = abs
			}
			if !yes {
				fmt.Fprintf(c.ErrOrStderr(), recoverConsequences, dir, wait.String())
				return failed(fmt.Errorf("nothing was changed; add --yes to go on"))
			}
			identity, err := daemon.Recover(c.Context(), cfg, time.Duration(wait))
			if err != nil {
				return failed(fmt.Errorf("recover %s: %w\n  Is the authority stopped, and is this its configuration?", dir, err))
			}
			if o.json() {
				return writeJSON(c.OutOrStdout(), map[string]string{"identity": identity, "data": dir, "no_grants_for": wait.String()})
			}
			fmt.Fprintf(c.OutOrStdout(), "the store %s in %s is the home now\n"+
				"buckets start empty, and nothing is granted for %s\n"+
				"next: start stipend-authority, then stipend policy list; if it shows none, stipend policy apply -f FILE\n", identity, dir, wait.String())
			return nil
		},
	}
	fs := c.Flags()
	fs.StringVar(&config, "config", "", "configuration `file` of the authority")
	fs.StringVar(&data, "data", "", "`folder` of its store and embedded etcd, instead of the file's")
	fs.Var(&wait, "no-grants-for", "at least the longest ttl of any policy ever in force")
	fs.BoolVar(&yes, "yes", false, "go on: the consequences are accepted")
	return c
}
