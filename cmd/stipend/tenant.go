package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"

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
		Long: `Shows what the authority knows of a tenant: what is in its bucket, which gateways
hold units and until when, who waits for refill, and why requests were refused.
With -o json it is the GetTenantResponse of stipend.v1.`,
		Example: "  stipend tenant show acme\n  stipend tenant show acme -o json",
		Args:    exactly(1, "a tenant"),
		RunE: func(c *cobra.Command, args []string) error {
			return conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				got, err := stipendv1.NewInspectServiceClient(cc).GetTenant(ctx, &stipendv1.GetTenantRequest{Tenant: args[0]})
				if err != nil {
					return err
				}
				return writeTenant(c.OutOrStdout(), o, got)
			})
		},
	})
	return c
}

func writeTenant(w io.Writer, o *output, got *stipendv1.GetTenantResponse) error {
	if o.json() {
		// Through encoding/json: protojson varies its white space on purpose.
		raw, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(got)
		if err != nil {
			return failed(err)
		}
		return writeJSON(w, rawJSON(raw))
	}
	t, err := wire.FromTenantPolicy(got.GetPolicy())
	if err != nil {
		return failed(fmt.Errorf("the authority's answer cannot be read: %w; is it of another version?", err))
	}
	fmt.Fprintf(w, "tenant %q, policy version %d, partition %d\n", t.Tenant, t.Version, got.GetPartition())
	switch {
	case t.Deleted || t.Policy == nil:
		fmt.Fprintln(w, "deleted: everything is refused")
	default:
		fmt.Fprintln(w, policyLine(t.Policy))
	}
	writeAccount(w, "", got.GetOrdinary())
	if got.GetEmergency() != nil {
		writeAccount(w, "emergency ", got.GetEmergency())
	}
	if n := len(got.GetLastRefusals()); n > 0 {
		fmt.Fprintln(w, "\nlast refusals at the authority")
		tab := newTable(w, "  AGO", "PATH", "REASON", "CLASS", "COST", "GATEWAY")
		for _, r := range got.GetLastRefusals() {
			tab.row("  "+seconds(r.GetAgo().AsDuration()), r.GetPath(), reasonName(r.GetReason()), orDash(r.GetRouteClass()), r.GetCost(), orDash(r.GetOwner()))
		}
		return tab.flush()
	}
	return nil
}

type rawJSON []byte

// MarshalJSON implements json.Marshaler.
func (r rawJSON) MarshalJSON() ([]byte, error) { return r, nil }

func reasonName(r stipendv1.Reason) string {
	s := strings.ToLower(strings.TrimPrefix(r.String(), "REASON_"))
	return strings.ReplaceAll(s, "_", "-")
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func writeAccount(w io.Writer, prefix string, a *stipendv1.Account) {
	fmt.Fprintf(w, "\n%sbucket\n", prefix)
	t := newTable(w)
	t.row("  level", a.GetLevel(), fmt.Sprintf("units, of a burst of %d", a.GetBurst()))
	t.row("  outstanding", a.GetOutstanding(), fmt.Sprintf("units in gateways' wallets, of N*q = %d", a.GetSlack()))
	t.row("  granted", a.GetGranted(), "units since the authority loaded the partition")
	t.row("  checked", a.GetChecked(), "units admitted by single checks")
	t.row("  expired", a.GetExpired(), "units that no gateway can spend any more")
	t.row("  discarded", a.GetDiscarded(), "units of wallets that were closed")
	if a.GetCheckCredit() > 0 {
		t.row("  check credit", a.GetCheckCredit(), "units kept for checks while grants are parked")
	}
	t.flush()
	if len(a.GetOwners()) > 0 {
		fmt.Fprintf(w, "\n%sholders\n", prefix)
		t = newTable(w, "  GATEWAY", "STATE", "UNSPENT AT MOST", "FREE IN", "LAST GRANT", "INCARNATION")
		for _, one := range a.GetOwners() {
			t.row("  "+orDash(one.GetOwner()), one.GetState(), one.GetOutstanding(), seconds(one.GetExpiresIn().AsDuration()), one.GetLastGrantId(), hex.EncodeToString(one.GetIncarnation()))
		}
		t.flush()
	}
	if len(a.GetParked()) > 0 {
		fmt.Fprintf(w, "\n%sparked grants, waiting for refill\n", prefix)
		t = newTable(w, "  GATEWAY", "WANTS", "AT LEAST", "WAITED", "ESTIMATE")
		for _, one := range a.GetParked() {
			t.row("  "+orDash(one.GetOwner()), one.GetWant(), one.GetMin(), one.GetWaited().AsDuration().Round(time.Millisecond), one.GetEstimate().AsDuration().Round(time.Millisecond))
		}
		t.flush()
	}
}
