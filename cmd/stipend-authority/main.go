// Command stipend-authority runs the central authority of a Stipend
// installation: one process, its store and its etcd in one folder.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stipend/stipend/authority/daemon"
	"github.com/stipend/stipend/cmd/internal/conf"
)

const long = `stipend-authority holds one token bucket per tenant and hands out grants to agents.

It keeps its ledger in a folder on this machine's disk, every commit synced, and
runs an etcd in the same folder for the registry of agents. Policies are not part
of its configuration: apply them with "stipend policy apply".

Settings come from flags, over environment variables (STIPEND_LISTEN for
--listen), over the file given by --config, over the defaults. --print-config
shows the outcome in the form of that file and ends.

A store serves only where etcd knows it to be at home. A second node, an empty or
replaced disk and a restored backup are refused until an operator, with every
authority stopped, runs "stipend recover".

Plain text is served on loopback only, unless --insecure says that it is meant.
SIGTERM and SIGINT drain: agents are asked to leave, what is queued is decided.`

const example = `  # start on one machine, data in ./authority
  stipend-authority --data ./authority

  # see all settings, then run with a file
  stipend-authority --data /var/lib/stipend --print-config > authority.yaml
  stipend-authority --config authority.yaml

  # for agents on other machines
  stipend-authority --data /var/lib/stipend --listen :7400 \
    --tls-cert server.pem --tls-key server.key --tls-client-ca agents.pem`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := command().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "stipend-authority:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	cfg := daemon.DefaultConfig()
	var path string
	var show bool
	cmd := &cobra.Command{
		Use:           "stipend-authority --data FOLDER",
		Short:         "Run the central authority",
		Long:          long,
		Example:       example,
		Version:       version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := cmd.Flags()
	flags.StringVar(&path, "config", "", "YAML file with settings")
	flags.BoolVar(&show, "print-config", false, "print all settings as YAML and end")
	for _, f := range conf.Fields(&cfg) {
		if f.Help == "" {
			continue // by file and environment only
		}
		flags.String(f.Flag, f.Default, f.Help)
		if f.Bool {
			flags.Lookup(f.Flag).NoOptDefVal = "true"
		}
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		given := map[string]string{}
		flags.Visit(func(f *pflag.Flag) {
			if f.Name != "config" && f.Name != "print-config" {
				given[f.Name] = f.Value.String()
			}
		})
		if err := conf.Load(path, &cfg, conf.Sources{Env: os.Environ(), Flags: given}); err != nil {
			return err
		}
		if show {
			_, err := cmd.OutOrStdout().Write(conf.YAML(&cfg))
			return err
		}
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
		slog.SetDefault(cfg.Logger)
		cfg.Version = version()
		return daemon.Run(cmd.Context(), cfg)
	}
	return cmd
}

// version is that of the module or, in a checkout, the commit.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && info.Main.Version == "(devel)" {
			return "devel-" + s.Value[:min(12, len(s.Value))]
		}
	}
	return info.Main.Version
}
