package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/cmd/internal/conf"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

func newPolicy(o *output) *cobra.Command {
	conn := &connection{}
	c := &cobra.Command{
		Use:   "policy",
		Short: "Set, show and delete the policies of tenants",
		Long: `Policies live in the authority's ledger; a file is only how they get there. Every
change makes a new version, and takes effect with the next grant or check.`,
		Example: `  stipend policy apply -f policies.yaml --dry-run   what would change?
  stipend policy apply -f policies.yaml
  stipend policy get acme
  stipend policy list`,
	}
	conn.register(c.PersistentFlags())
	commands(c, newPolicyApply(o, conn), newPolicyGet(o, conn), newPolicyList(o, conn), newPolicyDelete(o, conn))
	return c
}

// change is what happened, or would happen, to one tenant's policy.
type change struct {
	Tenant   string   `json:"tenant"`
	Action   string   `json:"action"` // created, changed, unchanged, deleted; with --dry-run "would be ..."
	Version  uint64   `json:"version"`
	Warnings []string `json:"warnings"`
}

func newPolicyApply(o *output, conn *connection) *cobra.Command {
	var file, expect string
	var dry bool
	c := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Set the policies of the tenants in a file",
		Long: `Sets the policy of each tenant in the file. Tenants that the file does not name
keep theirs. A faulty file changes nothing at all. Units that gateways hold and
what was spent stay: a change mints nothing.

Each tenant is one transaction. When one is refused, those before it are set and
those after it are not; applying the file again is safe.`,
		Example: `  stipend policy apply -f policies.yaml --dry-run
  stipend policy apply -f acme.yaml --expect-version 7   only if nobody changed it since

A policy file:

  plans:
    pro:
      rate: 600 per 1m
      burst: 200
      classes: {read: 1, write: {cost: 5, central: true}}
      grant: {quantum: 2, owners: 8, ttl: 60s}
  tenants:
    acme: {plan: pro, burst: 400}`,
		Args: exactly(0, "its file after -f"),
		RunE: func(c *cobra.Command, _ []string) error {
			list, err := readPolicies(file, c.InOrStdin())
			if err != nil {
				return err
			}
			var expected *uint64
			if expect != "" {
				v, err := strconv.ParseUint(expect, 10, 64)
				if err != nil {
					return badInputf("--expect-version: %q; allowed: a version as stipend policy get shows it, 0 for a new tenant", expect)
				}
				if len(list) != 1 {
					return badInputf("--expect-version is for one tenant, and %s has %s; apply it tenant by tenant", inputName(file), plural(len(list), "tenant"))
				}
				expected = &v
			}
			if err := strictly(list); err != nil {
				return err
			}
			if len(list) == 0 && !o.json() {
				fmt.Fprintf(c.OutOrStdout(), "%s names no tenants: there is nothing to set\n", inputName(file))
				return nil
			}
			var changes []change
			err = conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				client := stipendv1.NewPolicyServiceClient(cc)
				for _, t := range list {
					one, err := apply(ctx, client, t, expected, dry)
					if err != nil {
						if len(changes) > 0 {
							fmt.Fprintf(c.ErrOrStderr(), "stipend: stopped at tenant %q; the %d before it are set\n", t.Tenant, len(changes))
						}
						return err
					}
					changes = append(changes, one)
				}
				return nil
			})
			if len(changes) > 0 || err == nil {
				if werr := writeChanges(c.OutOrStdout(), o, changes); werr != nil && err == nil {
					err = werr
				}
			}
			return err
		},
	}
	fs := c.Flags()
	fs.StringVarP(&file, "filename", "f", "", "policy `file` (YAML); - is standard input")
	fs.BoolVar(&dry, "dry-run", false, "change nothing, only say what would change")
	fs.StringVar(&expect, "expect-version", "", "`version` that the one tenant of the file must have; 0: it must be new")
	return c
}

func readPolicies(file string, in io.Reader) ([]conf.TenantPolicy, error) {
	switch file {
	case "":
		return nil, badInputf("no file is given; say -f policies.yaml, or -f - for standard input")
	case "-":
		raw, err := io.ReadAll(io.LimitReader(in, 64<<20))
		if err != nil {
			return nil, badInputf("standard input: %w", err)
		}
		list, err := conf.ParsePolicies("standard input", raw)
		if err != nil {
			return nil, badInput(err)
		}
		return list, nil
	}
	list, err := conf.LoadPolicies(file)
	if err != nil {
		return nil, badInput(err)
	}
	return list, nil
}

// inputName is how messages call the input of a -f flag.
func inputName(file string) string {
	if file == "-" {
		return "standard input"
	}
	return file
}

// strictly refuses policies that cannot keep the promise, where the file says so.
func strictly(list []conf.TenantPolicy) error {
	var errs []error
	for _, t := range list {
		if !t.Strict {
			continue
		}
		for _, w := range bounds.Warnings(t.Policy, 0) {
			errs = append(errs, fmt.Errorf("%s: tenant %q: %s (the file says strict: true)", t.At, t.Tenant, w))
		}
	}
	if len(errs) > 0 {
		return badInput(errors.Join(errs...))
	}
	return nil
}

// apply puts one policy. Without an expected version it expects the one it has
// just read, so that a change that comes between is not overwritten unseen.
func apply(ctx context.Context, client stipendv1.PolicyServiceClient, t conf.TenantPolicy, expected *uint64, dry bool) (change, error) {
	out := change{Tenant: string(t.Tenant), Action: "created", Warnings: bounds.Warnings(t.Policy, 0)}
	if out.Warnings == nil {
		out.Warnings = []string{}
	}
	wanted := wire.ToPolicy(t.Policy)
	got, err := client.GetPolicy(ctx, &stipendv1.GetPolicyRequest{Tenant: out.Tenant})
	switch {
	case status.Code(err) == codes.NotFound:
	case err != nil:
		return out, err
	default:
		out.Version = got.GetPolicy().GetVersion()
		switch {
		case got.GetPolicy().GetDeleted():
		case proto.Equal(got.GetPolicy().GetPolicy(), wanted):
			out.Action = "unchanged"
		default:
			out.Action = "changed"
		}
	}
	if expected == nil {
		expected = &out.Version
	}
	if dry {
		if *expected != out.Version {
			return out, failed(fmt.Errorf("tenant %q has version %d, expected was %d; look at it with stipend policy get", t.Tenant, out.Version, *expected))
		}
		if out.Action != "unchanged" {
			out.Action = "would be " + out.Action
		}
		return out, nil
	}
	put, err := client.PutPolicy(ctx, &stipendv1.PutPolicyRequest{Tenant: out.Tenant, Policy: wanted, ExpectedVersion: *expected})
	if err != nil {
		return out, err
	}
	out.Version = put.GetVersion()
	if put.GetUnchanged() {
		out.Action = "unchanged"
	}
	return out, nil
}

func writeChanges(w io.Writer, o *output, changes []change) error {
	if o.json() {
		if changes == nil {
			changes = []change{}
		}
		return writeJSON(w, changes)
	}
	t := newTable(w, "TENANT", "VERSION", "WHAT")
	for _, one := range changes {
		version := "-" // there is none yet
		if one.Version > 0 {
			version = strconv.FormatUint(one.Version, 10)
		}
		t.row(one.Tenant, version, one.Action)
	}
	if err := t.flush(); err != nil {
		return err
	}
	for _, one := range changes {
		for _, s := range one.Warnings {
			fmt.Fprintf(w, "\nwarning: %s\n", wrap("tenant "+strconv.Quote(one.Tenant)+": "+s, 90, "         "))
		}
	}
	return nil
}

// tenantPolicyJSON is one tenant in the answers of get and list.
type tenantPolicyJSON struct {
	Tenant   string      `json:"tenant"`
	Version  uint64      `json:"version"`
	Deleted  bool        `json:"deleted"`
	Policy   *policyJSON `json:"policy"`
	Warnings []string    `json:"warnings,omitempty"`
}

func newPolicyGet(o *output, conn *connection) *cobra.Command {
	return &cobra.Command{
		Use:     "get TENANT",
		Short:   "Show one tenant's policy, as a file that apply takes",
		Example: "  stipend policy get acme > acme.yaml   # edit it, then: stipend policy apply -f acme.yaml",
		Args:    exactly(1, "a tenant"),
		RunE: func(c *cobra.Command, args []string) error {
			return conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				got, err := stipendv1.NewPolicyServiceClient(cc).GetPolicy(ctx, &stipendv1.GetPolicyRequest{Tenant: args[0]})
				if err != nil {
					return err
				}
				t, err := wire.FromTenantPolicy(got.GetPolicy())
				if err != nil {
					return failed(fmt.Errorf("the authority's answer cannot be read: %w; is it of another version?", err))
				}
				w := c.OutOrStdout()
				if o.json() {
					return writeJSON(w, tenantPolicyJSON{string(t.Tenant), t.Version, t.Deleted, toPolicyJSON(t.Policy), got.GetWarnings()})
				}
				fmt.Fprintf(w, "# tenant %q, version %d\n", t.Tenant, t.Version)
				if t.Deleted || t.Policy == nil {
					fmt.Fprintln(w, "# deleted: it admits nothing. Apply a policy to admit again; what was spent stays spent.")
					return nil
				}
				for _, s := range got.GetWarnings() {
					fmt.Fprintf(w, "# %s\n", wrap(s, 90, "# "))
				}
				_, err = w.Write(conf.PoliciesYAML([]conf.TenantPolicy{{Tenant: t.Tenant, Policy: t.Policy}}))
				return err
			})
		},
	}
}

func newPolicyList(o *output, conn *connection) *cobra.Command {
	var page int32
	var token string
	c := &cobra.Command{
		Use:   "list",
		Short: "List the policies of all tenants, page by page",
		Example: `  stipend policy list                      everything, fetched in pages
  stipend policy list --page-size 50       one page; its end says how to go on`,
		Args: exactly(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			one := c.Flags().Changed("page-size") || token != ""
			var list []wire.TenantPolicy
			next := token
			err := conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				client := stipendv1.NewPolicyServiceClient(cc)
				for {
					got, err := client.ListPolicies(ctx, &stipendv1.ListPoliciesRequest{PageSize: page, PageToken: next})
					if err != nil {
						return err
					}
					for _, m := range got.GetPolicies() {
						t, err := wire.FromTenantPolicy(m)
						if err != nil {
							return failed(fmt.Errorf("the authority's answer cannot be read: %w; is it of another version?", err))
						}
						list = append(list, t)
					}
					if next = got.GetNextPageToken(); next == "" || one {
						return nil
					}
				}
			})
			if err != nil {
				return err
			}
			return writePolicyList(c.OutOrStdout(), o, list, page, next)
		},
	}
	c.Flags().Int32Var(&page, "page-size", 1000, "tenants of one page, 1 to 1000")
	c.Flags().StringVar(&token, "page", "", "`token` of the page, from the end of the one before")
	return c
}

func writePolicyList(w io.Writer, o *output, list []wire.TenantPolicy, page int32, next string) error {
	if o.json() {
		out := struct {
			Policies []tenantPolicyJSON `json:"policies"`
			Next     string             `json:"next_page"`
		}{[]tenantPolicyJSON{}, next}
		for _, t := range list {
			out.Policies = append(out.Policies, tenantPolicyJSON{string(t.Tenant), t.Version, t.Deleted, toPolicyJSON(t.Policy), nil})
		}
		return writeJSON(w, out)
	}
	if len(list) == 0 {
		fmt.Fprintln(w, "no policies; stipend policy apply -f FILE sets some")
		return nil
	}
	t := newTable(w, "TENANT", "VERSION", "MODE", "PLAN", "RATE", "BURST", "N", "q", "TTL", "CLASSES")
	for _, one := range list {
		p := one.Policy
		if one.Deleted || p == nil {
			t.row(one.Tenant, one.Version, "deleted", "-", "-", "-", "-", "-", "-", "-")
			continue
		}
		plan := p.Plan
		if plan == "" {
			plan = "-"
		}
		t.row(one.Tenant, one.Version, p.Mode, plan, conf.FormatRate(p.Rate), p.Burst, p.Grant.Owners, p.Grant.Quantum,
			conf.FormatDuration(p.Grant.TTL), len(p.Classes))
	}
	if err := t.flush(); err != nil {
		return err
	}
	if next != "" {
		fmt.Fprintf(w, "\nthere are more: stipend policy list --page-size %d --page %s\n", page, next)
	}
	return nil
}

func newPolicyDelete(o *output, conn *connection) *cobra.Command {
	var expect uint64
	c := &cobra.Command{
		Use:   "delete TENANT",
		Short: "Delete one tenant's policy: nothing is admitted any more",
		Long: `A deleted tenant is refused everything. Units that gateways hold may still be
spent until they expire (one ttl). Its bucket stays as long as it matters: adding
the tenant again goes on where it stood.`,
		Example: "  stipend policy delete acme --expect-version 7",
		Args:    exactly(1, "a tenant"),
		RunE: func(c *cobra.Command, args []string) error {
			out := change{Tenant: args[0], Action: "deleted", Warnings: []string{}}
			err := conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				put, err := stipendv1.NewPolicyServiceClient(cc).PutPolicy(ctx, &stipendv1.PutPolicyRequest{
					Tenant: args[0], ExpectedVersion: expect, AnyVersion: !c.Flags().Changed("expect-version"),
				})
				if err != nil {
					return err
				}
				out.Version = put.GetVersion()
				if put.GetUnchanged() {
					out.Action = "was deleted before"
				}
				return nil
			})
			if err != nil {
				return err
			}
			return writeChanges(c.OutOrStdout(), o, []change{out})
		},
	}
	c.Flags().Uint64Var(&expect, "expect-version", 0, "`version` that the tenant must have; without it any")
	return c
}
