// Command stipend is the operator's tool: it states bounds as numbers, verifies
// recorded admissions against them, changes and shows policies at an
// authority, and runs the whole product on one machine (stipend demo).
//
// Exit codes of every command: 0 all is well, 1 a bound is broken, a promise is
// not kept or the authority refused, 2 the input or the call is wrong.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process: it returns the exit code.
func run(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var e *exit
	if !errors.As(err, &e) {
		e = &exit{code: 2, err: err} // cobra's own: unknown commands and the like
	}
	if e.err != nil {
		fmt.Fprintf(errOut, "stipend: %s\n", strings.TrimSpace(e.err.Error()))
	}
	return e.code
}

// exit is an error that ends the process with a code. Without an inner error
// everything has been said already.
type exit struct {
	code int
	err  error
}

func (e *exit) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exit) Unwrap() error { return e.err }

// failed means that something was refused or did not work.
func failed(err error) error { return &exit{1, err} }

// badInput means that the caller has to change something.
func badInput(err error) error { return &exit{2, err} }

func badInputf(format string, args ...any) error { return badInput(fmt.Errorf(format, args...)) }

func newRoot() *cobra.Command {
	o := &output{}
	root := &cobra.Command{
		Use:   "stipend",
		Short: "Limit what tenants use across gateways, under a proven bound",
		Long: `Stipend limits what each tenant may use, across every gateway, so that in every
interval of length T at most

    A(T) <= r*T + B + N*q

units are admitted: r is the tenant's rate, B its burst, N the gateways that hold
units at once and q the most that one of them holds.`,
		Example: `  stipend demo                                  the whole product on this machine, in 25 seconds
  stipend bounds --rate 10000/s --burst 2000 --owners 32 --quantum 100 --ttl 11s
  stipend policy apply -f policies.yaml         set the policies of an authority
  stipend tenant show acme                      where a tenant's units are
  stipend verify admissions.log --policy policies.yaml`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
		PersistentPreRunE: func(*cobra.Command, []string) error { return o.validate() },
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return badInputf("%w; %s --help lists the flags", err, c.CommandPath())
	})
	o.register(root.PersistentFlags())
	root.AddCommand(newBounds(o), newVerify(o), newDemo(o), newPolicy(o), newTenant(o), newRecover(o))
	return root
}

// exactly is an argument count that is reported as bad input.
func exactly(n int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != n {
			return badInputf("%s takes %s, not %d arguments; see %s --help", c.CommandPath(), what, len(args), c.CommandPath())
		}
		return nil
	}
}
