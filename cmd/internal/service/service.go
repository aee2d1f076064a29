// Package service makes the command of a daemon: flags, environment and file
// into its configuration, signals into the end of its context.
package service

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

	"github.com/stipend/stipend/cmd/internal/conf"
)

// Main runs the command and ends the process with 1 after an error. The first
// SIGTERM or SIGINT ends the daemon's context, a second one the process.
func Main(cmd *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	err := cmd.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
		os.Exit(1)
	}
}

// Configure gives the command a flag for every field of the struct that cfg
// points to and that has a help text, --config and --print-config, and run,
// which is called with cfg filled in. Flags of the command's own are no settings.
func Configure(cmd *cobra.Command, cfg any, run func(context.Context, *slog.Logger) error) {
	var path string
	var show bool
	cmd.Version, cmd.Args, cmd.SilenceUsage, cmd.SilenceErrors = Version(), cobra.NoArgs, true, true
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&path, "config", "", "YAML file with settings")
	flags.BoolVar(&show, "print-config", false, "print all settings as YAML and end")
	settings := map[string]bool{}
	for _, f := range conf.Fields(cfg) {
		if f.Help == "" {
			continue // by file and environment only
		}
		settings[f.Flag] = true
		flags.String(f.Flag, f.Default, f.Help)
		if f.Bool {
			flags.Lookup(f.Flag).NoOptDefVal = "true"
		}
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		given := map[string]string{}
		flags.Visit(func(f *pflag.Flag) {
			if settings[f.Name] {
				given[f.Name] = f.Value.String()
			}
		})
		err := conf.Load(path, cfg, conf.Sources{Env: os.Environ(), Flags: given})
		if show { // also what is not complete yet: it is the form to fill in
			if _, failed := cmd.OutOrStdout().Write(conf.YAML(cfg)); failed != nil {
				return failed
			}
		}
		if err != nil || show {
			return err
		}
		log := slog.New(slog.NewTextHandler(os.Stderr, nil))
		slog.SetDefault(log)
		return run(cmd.Context(), log)
	}
}

// Version is that of the module or, in a checkout, the commit.
func Version() string {
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
