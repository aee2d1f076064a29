// Command stipend is the operator's tool: it states bounds as numbers, verifies
// recorded admissions against them, changes and shows policies at an
// authority, and runs the whole product on one machine (stipend demo).
//
// Exit codes of every command: 0 all is well, 1 a bound is broken, a promise is
// not kept or the authority refused, 2 the input or the call is wrong, 130 it was
// interrupted.
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

	"github.com/stipend/stipend/cmd/internal/service"
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

// interrupted means that a signal ended the command before its work was done:
// the exit code is what shells give for one ended by SIGINT.
func interrupted(then string) error { return &exit{130, errors.New("interrupted" + then)} }

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
units at once and q the most that one of them holds.

Exit codes: 0 all is well; 1 a bound is broken, a promise is not kept or the
authority refused; 2 the input or the call is wrong; 130 it was interrupted.

With -o json an answer is one document for scripts. Counts and units are numbers,
words (mode, reason, state) are lower-case, rates and durations are strings as in
policy files ("600 per 1m", "1.5s"), incarnations are 32 hexadecimal digits; a name
that ends in _ns is a number of nanoseconds. Fields keep name, type and meaning
within a major version; new ones may come, so ignore those you do not know. Tables
are for people and may change.`,
		Example: `  stipend demo                                  the whole product on this machine, in 25 seconds
  stipend bounds --rate 10000/s --burst 2000 --owners 32 --quantum 100 --ttl 11s
  stipend policy apply -f policies.yaml         set the policies of an authority
  stipend tenant show acme                      where a tenant's units are
  stipend verify admissions.log --policy policies.yaml`,
		Version:           service.Version(),
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
		PersistentPreRunE: func(*cobra.Command, []string) error { return o.validate() },
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		// Flags are read before the name of the command is judged: a flag of the
		// command that was meant is not what is wrong.
		if name := c.Flags().Arg(0); name != "" && c.HasAvailableSubCommands() {
			return noCommand(c, name)
		}
		return badInputf("%w; %s --help lists the flags", err, c.CommandPath())
	})
	o.register(root.PersistentFlags())
	commands(root, newBounds(o), newVerify(o), newDemo(o), newPolicy(o), newTenant(o), newIncarnation(o), newRecover(o))
	return root
}

// commands makes a command out of others: without one of them it prints its
// help, and an unknown one is answered with the nearest or with all there are.
func commands(c *cobra.Command, under ...*cobra.Command) {
	c.AddCommand(under...)
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return noCommand(c, args[0])
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
}

func noCommand(c *cobra.Command, given string) error {
	c.SuggestionsMinimumDistance = 2
	what := "did you mean "
	names := c.SuggestionsFor(given)
	if len(names) == 0 {
		what = "it has "
		for _, one := range c.Commands() {
			if one.IsAvailableCommand() {
				names = append(names, one.Name())
			}
		}
	}
	if last := len(names) - 1; last > 0 {
		word := " or "
		if what == "it has " {
			word = " and "
		}
		names = []string{strings.Join(names[:last], ", ") + word + names[last]}
	}
	end := ""
	if what == "did you mean " {
		end = "?"
	}
	return badInputf("%s has no command %q; %s%s%s", c.CommandPath(), given, what, names[0], end)
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
