package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/cmd/stipend/demo"
)

func newDemo(o *output) *cobra.Command {
	var file, dir string
	var t demo.Trace
	length, window := durationFlag(20*time.Second), durationFlag(combinedWindow)
	c := &cobra.Command{
		Use:   "demo",
		Short: "The whole product on this machine: load, a crash, and the verdict",
		Long: `Starts one authority and three agents as processes of their own, in front of a
small backend, all on loopback and in a temporary folder. Sends a hot tenant twice
its limit (90/9/1 over the gateways, and moving), cold tenants and an abuser; kills
the busiest agent with SIGKILL and starts it again.

The verdict rests on what the backend recorded with its own clock. Exit code 1 when
the bound is broken, or the hot tenant got less than 97 % of its limit.

--trace replays real traffic instead. From a CSV: one hot tenant, whose requests
cost the sum of the cost columns, under a limit that the trace overruns. From an
access log (combined format): every client is a tenant with a limit of its own.

At the end everything is stopped. Configuration, keys, records and logs stay in the
folder, with the commands that start the pieces by hand. Ctrl-C stops everything
before its end and removes the folder, unless it was named with --dir; the exit code
is then 130.`,
		Example: `  stipend demo
  stipend demo --for 1m -o json
  stipend demo --trace azure.csv                              columns are found by name
  stipend demo --trace calls.csv --time-column ts --cost-columns in,out --speed 60
  stipend demo --trace access.log --for 30s`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return badInputf("%s takes flags only, or the command backend, and not %q", c.CommandPath(), args[0])
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			cfg := demo.Config{Length: time.Duration(length), Dir: dir, Progress: c.ErrOrStderr()}
			if file != "" {
				t.File, t.Window = file, time.Duration(window)
				if err := lookAtTrace(&t); err != nil {
					return badInput(err)
				}
				cfg.Trace = &t
			} else if t.Speed != 0 || t.TimeColumn != "" || len(t.CostColumns) > 0 {
				return badInputf("--speed, --time-column and --cost-columns are for a trace; add --trace FILE")
			}
			if err := cfg.Validate(); err != nil {
				return badInputf("--for, --speed: %w", err)
			}
			res, err := demo.Run(c.Context(), cfg)
			var bad *trace.Error
			switch {
			case err != nil && c.Context().Err() != nil:
				if dir != "" {
					return interrupted("; everything was stopped; what there is of it stays in " + dir)
				}
				return interrupted("; everything was stopped and removed")
			case errors.As(err, &bad):
				return badInput(err)
			case err != nil:
				return failed(err)
			case o.json():
				err = writeJSON(c.OutOrStdout(), res)
			default:
				err = res.Write(c.OutOrStdout())
			}
			if err == nil && !res.OK() {
				err = &exit{code: 1}
			}
			return err
		},
	}
	fs := c.Flags()
	fs.Var(&length, "for", "length of the load; a trace without --speed is replayed in that time")
	fs.StringVar(&file, "trace", "", "replay this `file`: CSV, or an access log in combined format; gzip if it ends in .gz")
	fs.Float64Var(&t.Speed, "speed", 0, "by how much faster the trace is replayed; 0 fits it into --for")
	fs.StringVar(&t.TimeColumn, "time-column", "", "`column` of the time in a CSV")
	fs.StringSliceVar(&t.CostColumns, "cost-columns", nil, "`columns` of a CSV whose sum is the cost of a request")
	fs.Var(&window, "window", "lines of the trace may be out of order by this much")
	fs.StringVar(&dir, "dir", "", "empty or new `folder` for everything; default: a new one among the temporary ones")
	c.AddCommand(newDemoBackend())
	return c
}

// Columns that are known by name.
var (
	knownTime = []string{"TIMESTAMP", "timestamp", "time"}
	knownCost = []string{"ContextTokens", "GeneratedTokens"}
)

// lookAtTrace tells the format from the first line, and finds columns by name.
func lookAtTrace(t *demo.Trace) error {
	f, err := os.Open(t.File)
	if err != nil {
		return err
	}
	defer f.Close()
	b := bufio.NewReader(f)
	if magic, _ := b.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return fmt.Errorf("%s: %w", t.File, err)
		}
		b = bufio.NewReader(z)
	}
	head, _ := b.Peek(4 << 10)
	first, _, _ := strings.Cut(string(head), "\n")
	first = strings.TrimSpace(strings.TrimPrefix(first, "\ufeff"))
	switch {
	case first == "":
		return fmt.Errorf("%s is empty; is it the right file?", t.File)
	case strings.Contains(first, " [") && strings.Contains(first, `] "`):
		t.Kind = trace.Combined
		return nil
	case !strings.Contains(first, ","):
		return fmt.Errorf("%s is neither a CSV with names in its first line nor an access log in combined format", t.File)
	}
	t.Kind = trace.CSV
	columns := strings.Split(first, ",")
	for i := range columns {
		columns[i] = strings.Trim(strings.TrimSpace(columns[i]), `"`)
	}
	if t.TimeColumn == "" {
		for _, name := range knownTime {
			if slices.Contains(columns, name) && t.TimeColumn == "" {
				t.TimeColumn = name
			}
		}
	}
	if len(t.CostColumns) == 0 {
		for _, name := range knownCost {
			if slices.Contains(columns, name) {
				t.CostColumns = append(t.CostColumns, name)
			}
		}
	}
	if t.TimeColumn == "" || len(t.CostColumns) == 0 {
		return fmt.Errorf("%s has the columns %s; say --time-column and --cost-columns", t.File, strings.Join(columns, ", "))
	}
	return nil
}

// newDemoBackend is something to put the pieces in front of by hand.
func newDemoBackend() *cobra.Command {
	var listen string
	c := &cobra.Command{
		Use:     "backend",
		Short:   "A backend that answers everything with ok, for trying the pieces by hand",
		Example: "  stipend demo backend --listen 127.0.0.1:9000",
		Args:    exactly(0, "flags only"),
		RunE: func(c *cobra.Command, _ []string) error {
			l, err := net.Listen("tcp", listen)
			if err != nil {
				return failed(err)
			}
			fmt.Fprintf(c.ErrOrStderr(), "answering ok at http://%s until interrupted\n", l.Addr())
			server := &http.Server{
				ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Hour,
				Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }),
			}
			stopped := context.AfterFunc(c.Context(), func() { server.Close() })
			defer stopped()
			if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				return failed(err)
			}
			return nil
		},
	}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:9000", "host:port")
	return c
}
