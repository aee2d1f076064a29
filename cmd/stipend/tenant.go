package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/stipend/stipend/cmd/internal/conf"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

func newTenant(o *output) *cobra.Command {
	conn := &connection{}
	c := &cobra.Command{
		Use:     "tenant",
		Short:   "Show where a tenant's units are",
		Example: "  stipend tenant show acme",
	}
	conn.register(c.PersistentFlags())
	commands(c, &cobra.Command{
		Use:   "show TENANT",
		Short: "Level, owners, outstanding units, parked grants and last refusals",
		Long: `Shows what the authority knows of a tenant: its policy, what is in its bucket,
which gateways hold units and until when, who waits for refill, and why requests
were refused. With -o json the policy is as in stipend policy get.`,
		Example: "  stipend tenant show acme\n  stipend tenant show acme -o json",
		Args:    exactly(1, "a tenant"),
		RunE: func(c *cobra.Command, args []string) error {
			return conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				got, err := stipendv1.NewInspectServiceClient(cc).GetTenant(ctx, &stipendv1.GetTenantRequest{Tenant: args[0]})
				if err != nil {
					return err
				}
				t, err := wire.FromTenantPolicy(got.GetPolicy())
				if err != nil {
					return failed(fmt.Errorf("the authority's answer cannot be read: %w; is it of another version?", err))
				}
				state := toTenantStateJSON(t, got)
				if o.json() {
					return writeJSON(c.OutOrStdout(), state)
				}
				return writeTenant(c.OutOrStdout(), t.Policy, state)
			})
		},
	})
	return c
}

// screen is the width that tenant show keeps for names of up to 14 characters.
const screen = 80

// writeTenant tells a person. The policy is that of the state, nil without one.
func writeTenant(w io.Writer, p *grant.Policy, s *tenantStateJSON) error {
	fmt.Fprintf(w, "tenant %q, policy version %d, partition %d\n", s.Tenant, s.Version, s.Partition)
	if s.Deleted || p == nil {
		fmt.Fprintln(w, "deleted: everything is refused")
	} else {
		writeTenantPolicy(w, p)
	}
	if err := writeAccount(w, "", s.Ordinary); err != nil {
		return err
	}
	if s.Emergency != nil {
		if err := writeAccount(w, "emergency ", s.Emergency); err != nil {
			return err
		}
	}
	if len(s.Refusals) == 0 {
		fmt.Fprintln(w, "\nlast refusals at the authority: none")
		return nil
	}
	fmt.Fprintln(w, "\nlast refusals at the authority")
	t := newTable(w, "  AGO", "PATH", "REASON", "CLASS", "COST", "GATEWAY")
	reasons := map[string]bool{}
	for _, r := range s.Refusals {
		reasons[r.Reason] = true
		t.row("  "+tenths(r.ago), r.Path, r.Reason, orDash(r.Class), r.Cost, orDash(r.Owner))
	}
	if err := t.flush(); err != nil {
		return err
	}
	t = newTable(w)
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		if words := meaning[reason]; words != "" {
			t.row("  "+reason+":", words)
		}
	}
	return t.flush()
}

// meaning is what a reason says of the tenant, for those that are about it.
var meaning = map[string]string{
	grant.Over.String():             "the bucket holds too little; it has to refill first",
	grant.CostExceedsBurst.String(): "the request costs more than B and can never pass",
	grant.NoRoom.String():           "other gateways hold all N*q",
	grant.UnknownRoute.String():     "the policy has no such class",
	grant.Deadline.String():         "the caller's deadline passed before the decision",
	grant.Overloaded.String():       "the authority had too much to do",
	grant.Fenced.String():           "an operator fenced the incarnation",
}

func writeTenantPolicy(w io.Writer, p *grant.Policy) {
	plan := ""
	if p.Plan != "" {
		plan = ", plan " + p.Plan
	}
	explained := map[grant.Mode]string{
		grant.Shadow: ": refusals are counted, and pass",
		grant.Off:    ": everything passes, nothing is deducted",
	}
	fmt.Fprintf(w, "mode %v%s%s\n", p.Mode, plan, explained[p.Mode])
	fmt.Fprintf(w, "rate r = %s, burst B = %d\n", conf.FormatRate(p.Rate), p.Burst)
	if g := p.Grant; g.Enabled() {
		fmt.Fprintf(w, "owners N = %d, quantum q = %d, ttl %s\n", g.Owners, g.Quantum, conf.FormatDuration(g.TTL))
	} else {
		fmt.Fprintln(w, "no grants: every request is checked at the authority")
	}
	if e := p.Emergency; e != nil {
		fmt.Fprintf(w, "emergency rate r_e = %s, burst B_e = %d, N_e = %d, q_e = %d, ttl %s\n",
			conf.FormatRate(e.Rate), e.Burst, e.Grant.Owners, e.Grant.Quantum, conf.FormatDuration(e.Grant.TTL))
	}
	classes := []string{}
	for _, name := range slices.Sorted(maps.Keys(p.Classes)) {
		c := p.Classes[name]
		s := fmt.Sprintf("%s %d", name, c.Cost)
		if c.Central {
			s += " (central)"
		}
		if c.Emergency {
			s += " (emergency)"
		}
		classes = append(classes, s)
	}
	if len(classes) == 0 {
		classes = []string{"none"}
	}
	fmt.Fprintf(w, "%s\n", wrap("classes and their costs: "+strings.Join(classes, ", "), screen, "  "))
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// tenths writes a duration for people, to a tenth of a second.
func tenths(d time.Duration) string { return fmt.Sprintf("%.1fs", d.Seconds()) }

func writeAccount(w io.Writer, prefix string, a *accountJSON) error {
	fmt.Fprintf(w, "\n%sbucket\n", prefix)
	t := newTable(w)
	t.row("  level", a.Level, fmt.Sprintf("units, of a burst of %d", a.Burst))
	t.row("  outstanding", a.Outstanding, fmt.Sprintf("units in gateways' wallets, of N*q = %d", a.Slack))
	t.row("  granted", a.Granted, "units since the authority loaded the partition")
	t.row("  checked", a.Checked, "units admitted by single checks")
	t.row("  expired", a.Expired, "units that no gateway can spend any more")
	t.row("  discarded", a.Discarded, "units of wallets that were closed")
	if a.CheckCredit > 0 {
		t.row("  check credit", a.CheckCredit, "units kept for checks while grants are parked")
	}
	if err := t.flush(); err != nil {
		return err
	}
	if len(a.Owners) > 0 {
		fmt.Fprintf(w, "\n%sholders\n", prefix)
		t = newTable(w, "  GATEWAY", "STATE", "AT MOST", "FREE IN", "INCARNATION")
		for _, one := range a.Owners {
			t.row("  "+orDash(one.Owner), one.State, one.Outstanding, tenths(one.expiresIn), one.Incarnation)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	if len(a.Parked) > 0 {
		fmt.Fprintf(w, "\n%sparked grants, waiting for refill\n", prefix)
		t = newTable(w, "  GATEWAY", "WANTS", "AT LEAST", "WAITED", "ESTIMATE")
		for _, one := range a.Parked {
			t.row("  "+orDash(one.Owner), one.Want, one.Min, one.waited.Round(time.Millisecond), one.estimate.Round(time.Millisecond))
		}
		return t.flush()
	}
	return nil
}
