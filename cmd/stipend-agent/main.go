// Command stipend-agent runs beside a gateway and decides its requests.
package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/stipend/stipend/agent/daemon"
	"github.com/stipend/stipend/cmd/internal/service"
)

const long = `stipend-agent decides the requests of one gateway from grants that it holds, and
asks the authority for those of tenants that are not hot.

It has two doors, and needs one of them: a reverse proxy in front of a backend
(--proxy-listen, --proxy-backend), and a forward-auth endpoint that nginx, Caddy,
Traefik or Envoy ask before they forward (--auth-listen, and --auth-source, which
says in what headers the gateway at hand names the request). Go programs use
package agent/gate instead.

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
    --authority-tls-enabled --identity-key-file keys \
    --proxy-listen :8080 --proxy-backend http://127.0.0.1:9000

  # see all settings
  stipend-agent --config agent.yaml --print-config`

func main() { service.Main(command()) }

func command() *cobra.Command {
	cfg := daemon.DefaultConfig()
	cmd := &cobra.Command{Use: "stipend-agent --config FILE", Short: "Decide the requests of one gateway", Long: long, Example: example}
	service.Configure(cmd, &cfg, func(ctx context.Context, log *slog.Logger) error {
		cfg.Logger, cfg.Version = log, service.Version()
		return daemon.Run(ctx, cfg)
	})
	return cmd
}
