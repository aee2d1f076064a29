package main

import (
	"fmt"
	"io"
	"math"
	"time"

	"github.com/spf13/cobra"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

// verify is one run of the command.
type verify struct {
	policies   policyFlags
	logs       logFlags
	rho        int64
	d          durationFlag
	skew       durationFlag
	tolerance  durationFlag
	top        int
	maxTenants int
}

func newVerify(o *output) *cobra.Command {
	v := &verify{skew: 0, tolerance: durationFlag(100 * time.Millisecond)}
	c := &cobra.Command{
		Use:   "verify FILE...",
		Short: "Check recorded admissions or access logs against a policy",
		Long: `Reads what gateways admitted and says for each tenant whether any interval, of
any length, admitted more than r*T + B + N*q. The check is exact over all intervals.
Several files are merged by time; gzip is understood; - is standard input.

Exit code 0: the bound held. 1: it is broken, and the worst interval is shown.
2: the input cannot be judged.

Records of agents carry their costs. For access logs, the cost is the sum of
--cost-columns, or what the policy asks for the request's class, or 1. Requests
answered 429 or 503 count as not admitted. A log written when requests end, as
nginx does, needs --duration-column, or their longest duration as --skew.`,
		Example: `  stipend verify gw-1.log gw-2.log gw-3.log --policy policies.yaml
  stipend verify access.log.gz --format combined --rate 5/s --burst 20 --window 1m
  stipend verify calls.csv --tenant acme --time-column TIMESTAMP \
      --cost-columns ContextTokens,GeneratedTokens --rate 6000/s --burst 60000
  zcat old.gz | stipend verify - --format jsonl --time-column ts --tenant-column customer \
      --status-column status --policy policies.yaml`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return badInputf("no file is given; name records of agents or access logs, or - for standard input")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error { return v.run(c, o, args) },
	}
	fs := c.Flags()
	v.policies.register(fs)
	v.logs.register(fs)
	fs.Int64Var(&v.rho, "rho-ppb", defaultRhoPPB, "rho: bound on the rate error of monotonic clocks, in parts per billion")
	fs.Var(&v.d, "forward-delay", "d: longest time from the start of an attempt to the recorded instant; 0: the decision was recorded")
	fs.Var(&v.skew, "skew", "by how much recorders' clocks may differ; the resolution of a log's times is added")
	fs.Var(&v.tolerance, "tolerance", "how much longer than its ttl a gateway may spend a grant (tolerance of the agents)")
	fs.IntVar(&v.top, "top", 20, "rows of the table, worst first; 0: all")
	fs.IntVar(&v.maxTenants, "max-tenants", 1_000_000, "most tenants that are judged")
	return c
}

func (v *verify) run(c *cobra.Command, o *output, files []string) error {
	priced, fallback, err := v.policy()
	if err != nil {
		return err
	}
	var readers []*trace.Reader
	defer func() {
		for _, r := range readers {
			r.Close()
		}
	}()
	skew := time.Duration(v.skew)
	for _, name := range files {
		r, err := v.logs.open(name, c.InOrStdin())
		if err != nil {
			return badInput(err)
		}
		readers = append(readers, r)
		skew = max(skew, time.Duration(v.skew)+r.Resolution())
	}
	cfg := bounds.Config{RhoPPB: v.rho, D: time.Duration(v.d), Skew: skew, Tolerance: time.Duration(v.tolerance)}
	judge, err := bounds.NewJudge(cfg, v.maxTenants, fallback)
	if err != nil {
		return badInput(err)
	}
	for tenant, p := range priced {
		if err := judge.Change(tenant, math.MinInt64, p); err != nil {
			return badInput(err)
		}
	}
	records, err := trace.Merge(readers...)
	if err != nil {
		return badInput(err)
	}
	rep := &report{
		clock: readers[0].Header().Clock, cfg: cfg, policies: priced, fallback: fallback, top: v.top,
		byClass: len(v.logs.cost) == 0 && v.logs.kind != trace.Admissions,
	}
	if err := rep.judge(judge, records); err != nil {
		return badInput(err)
	}
	for i, r := range readers {
		rep.note(files[i], r, v.d == 0)
	}
	if err := rep.write(c.OutOrStdout(), o); err != nil {
		return err
	}
	if !rep.held {
		return &exit{code: 1}
	}
	return nil
}

// policy is what tenants are held to: each its own, or all the same.
func (v *verify) policy() (map[grant.TenantID]*grant.Policy, *grant.Policy, error) {
	byNumbers, err := v.policies.numbers()
	if err != nil {
		return nil, nil, err
	}
	if byNumbers {
		p, err := v.policies.policy()
		return nil, p, err
	}
	list, err := v.policies.load()
	if err != nil {
		return nil, nil, err
	}
	out := make(map[grant.TenantID]*grant.Policy, len(list))
	for _, t := range list {
		out[t.Tenant] = t.Policy
	}
	return out, nil, nil
}

// when writes an instant for people.
func when(i grant.Instant, clock string) string {
	if clock == trace.Wall {
		return time.Unix(0, int64(i)).UTC().Format("2006-01-02T15:04:05.000000000Z")
	}
	return fmt.Sprintf("%d.%09ds", int64(i)/1e9, int64(i)%1e9)
}

func lines(w io.Writer, list []string) {
	for _, s := range list {
		fmt.Fprintln(w, s)
	}
}
