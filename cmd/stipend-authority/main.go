// Command stipend-authority runs the central authority of a Stipend
// installation: one process, its store and its etcd in one folder.
package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/stipend/stipend/authority/daemon"
	"github.com/stipend/stipend/cmd/internal/service"
)

const long = `stipend-authority holds one token bucket per tenant and hands out grants to agents.

It keeps its ledger in a folder on this machine's disk, every commit synced, and
runs an etcd in the same folder for the registry of agents. Policies are not part
of its configuration: apply them with "stipend policy apply".

Settings come from flags, over environment variables (STIPEND_LISTEN for
--listen), over the file given by --config, over the defaults. --print-config
shows the outcome in the form of that file and ends.

A store is created by --init only, which is given once, at the first start of a
new installation. From then on a store serves only where etcd knows it to be at
home. A second node, an empty or replaced disk and a restored backup are refused
until an operator, with every authority stopped, runs "stipend recover".

Plain text is served on loopback only, unless --insecure says that it is meant.
SIGTERM and SIGINT drain: agents are asked to leave, what is queued is decided.`

const example = `  # the first start on one machine, data in ./authority, and every later one
  stipend-authority --data ./authority --init
  stipend-authority --data ./authority

  # see all settings, then run with a file
  stipend-authority --data /var/lib/stipend --print-config > authority.yaml
  stipend-authority --config authority.yaml

  # for agents on other machines
  stipend-authority --data /var/lib/stipend --listen :7400 \
    --tls-cert server.pem --tls-key server.key --tls-client-ca agents.pem`

func main() { service.Main(command()) }

func command() *cobra.Command {
	cfg := daemon.DefaultConfig()
	cmd := &cobra.Command{Use: "stipend-authority --data FOLDER", Short: "Run the central authority", Long: long, Example: example}
	cmd.Flags().BoolVar(&cfg.Init, "init", false, "create the store: once, at the first start of a new installation")
	service.Configure(cmd, &cfg, func(ctx context.Context, log *slog.Logger) error {
		cfg.Logger, cfg.Version = log, service.Version()
		return daemon.Run(ctx, cfg)
	})
	return cmd
}
