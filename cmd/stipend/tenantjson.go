package main

import (
	"encoding/hex"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/cmd/internal/conf"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// tenantStateJSON is stipend tenant show -o json: the fields of stipend policy
// get, and those of stipend.v1's GetTenantResponse in the notation of all
// commands.
type tenantStateJSON struct {
	tenantPolicyJSON
	Partition int32         `json:"partition"`
	Decisions int64         `json:"live_decisions"`
	Ordinary  *accountJSON  `json:"ordinary"`
	Emergency *accountJSON  `json:"emergency"` // null: there is none
	Refusals  []refusalJSON `json:"last_refusals"`
}

type accountJSON struct {
	Level       int64         `json:"level"`
	Burst       int64         `json:"burst"`
	Outstanding int64         `json:"outstanding"`
	Slack       int64         `json:"slack"`
	CheckCredit int64         `json:"check_credit"`
	Granted     int64         `json:"granted"`
	Checked     int64         `json:"checked"`
	Expired     int64         `json:"expired"`
	Discarded   int64         `json:"discarded"`
	Owners      []holdingJSON `json:"owners"`
	Parked      []parkedJSON  `json:"parked"`
}

type holdingJSON struct {
	incarnationJSON
	Outstanding int64  `json:"outstanding"`
	ExpiresIn   string `json:"expires_in"`
	LastGrant   uint64 `json:"last_grant_id"`

	expiresIn time.Duration
}

type parkedJSON struct {
	Owner       string `json:"owner"`
	Incarnation string `json:"incarnation"`
	GrantID     uint64 `json:"grant_id"`
	Min         int64  `json:"min"`
	Want        int64  `json:"want"`
	Waited      string `json:"waited"`
	Estimate    string `json:"estimate"`

	waited, estimate time.Duration
}

type refusalJSON struct {
	Ago    string `json:"ago"`
	Path   string `json:"path"` // check or grant
	Reason string `json:"reason"`
	Cost   int64  `json:"cost"`
	Class  string `json:"route_class"` // empty: a grant has none
	Owner  string `json:"owner"`       // empty: not through an agent

	ago time.Duration
}

func toTenantStateJSON(t wire.TenantPolicy, got *stipendv1.GetTenantResponse) *tenantStateJSON {
	out := &tenantStateJSON{
		tenantPolicyJSON: tenantPolicyJSON{string(t.Tenant), t.Version, t.Deleted, toPolicyJSON(t.Policy), nil},
		Partition:        got.GetPartition(), Decisions: got.GetLiveDecisions(),
		Ordinary: toAccountJSON(got.GetOrdinary()), Refusals: []refusalJSON{},
	}
	if got.GetEmergency() != nil {
		out.Emergency = toAccountJSON(got.GetEmergency())
	}
	for _, r := range got.GetLastRefusals() {
		ago, text := span(r.GetAgo())
		out.Refusals = append(out.Refusals, refusalJSON{text, r.GetPath(), reasonName(r.GetReason()), r.GetCost(), r.GetRouteClass(), r.GetOwner(), ago})
	}
	return out
}

func toAccountJSON(a *stipendv1.Account) *accountJSON {
	out := &accountJSON{
		Level: a.GetLevel(), Burst: a.GetBurst(), Outstanding: a.GetOutstanding(), Slack: a.GetSlack(), CheckCredit: a.GetCheckCredit(),
		Granted: a.GetGranted(), Checked: a.GetChecked(), Expired: a.GetExpired(), Discarded: a.GetDiscarded(),
		Owners: []holdingJSON{}, Parked: []parkedJSON{},
	}
	for _, o := range a.GetOwners() {
		left, text := span(o.GetExpiresIn())
		who := incarnationJSON{o.GetOwner(), hex.EncodeToString(o.GetIncarnation()), o.GetState()}
		out.Owners = append(out.Owners, holdingJSON{who, o.GetOutstanding(), text, o.GetLastGrantId(), left})
	}
	for _, p := range a.GetParked() {
		waited, waitedText := span(p.GetWaited())
		estimate, estimateText := span(p.GetEstimate())
		out.Parked = append(out.Parked, parkedJSON{p.GetOwner(), hex.EncodeToString(p.GetIncarnation()), p.GetGrantId(), p.GetMin(), p.GetWant(),
			waitedText, estimateText, waited, estimate})
	}
	return out
}

func span(d *durationpb.Duration) (time.Duration, string) {
	return d.AsDuration(), conf.FormatDuration(d.AsDuration())
}

// reasonName is the reason's word; one that this build does not know, as a
// newer authority may send, is its number.
func reasonName(m stipendv1.Reason) string {
	r, err := wire.FromReason(m)
	if err != nil {
		return fmt.Sprintf("reason-%d", int32(m))
	}
	return r.String()
}
