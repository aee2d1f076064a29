// Command stipend-agent runs beside a gateway and decides its requests.
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

	"github.com/stipend/stipend/agent/daemon"
	"github.com/stipend/stipend/cmd/internal/conf"
)

const long = `stipend-agent decides the requests of one gateway from grants that it holds, and
asks the authority for those of tenants that are not hot.

It has two doors, and needs one of them: a reverse proxy in front of a backend
(--proxy-listen, --proxy-backend), and a forward-auth endpoint that nginx, Caddy,
Traefik or Envoy ask before they forward (--auth-listen). Go programs use package
agent/gate instead.

Who a request is comes from a file of API-key hashes (--identity-key-file), lines of

  sha256:HEX TENANT        HEX as printed by: printf %s "$KEY" | sha256sum

which is read again when it changes. What a request is comes from the routes of
the configuration file; what matches none is answered 404:

  routes:
    - {pattern: "POST /v1/chat/{id}", class: chat}

Settings come from flags, over environment variables (STIPEND_OWNER for --owner),
over the file given by --config, over the defaults. --print-config shows the
outcome in the form of that file and ends.

A refused request is answered 429 with Retry-After, one that cannot be decided 503.
SIGTERM, or /drain on the admin address, stops asking for grants, spends what is
held, and leaves.`

const example = `  # in front of a backend
  stipend-agent --config agent.yaml --authority-target authority:7400 \
    --identity-key-file keys --proxy-listen :8080 --proxy-backend http://127.0.0.1:9000

  # see all settings
  stipend-agent --config agent.yaml --print-config`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := command().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "stipend-agent:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	cfg := daemon.DefaultConfig()
	var path string
	var show bool
	cmd := &cobra.Command{
		Use: "stipend-agent --config FILE", Short: "Decide the requests of one gateway", Long: long, Example: example, Version: version(),
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	flags := cmd.Flags()
	flags.SortFlags = false
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
