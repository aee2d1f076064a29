package daemon

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// reply is the caller of one unary call.
type reply chan authority.Reply

func (r reply) receive(a authority.Reply) { r <- a } // capacity 1, one final reply

// ask puts one call to the tenant's partition and waits for its reply. The
// deadline of ctx becomes the call's: past it nothing is deducted any more.
func (d *daemon) ask(ctx context.Context, p grant.Partition, c authority.Call) (authority.Reply, error) {
	if at, ok := ctx.Deadline(); ok {
		end := deadline(d.clock().Mono, time.Until(at))
		if c.Deadline == 0 || end < c.Deadline {
			c.Deadline = end
		}
	}
	r := make(reply, 1)
	c.Caller = r
	d.partitions[p].offer(c)
	select {
	case a := <-r:
		return a, nil
	case <-ctx.Done():
		return authority.Reply{}, status.FromContextError(ctx.Err()).Err()
	}
}

// checkService decides single requests.
type checkService struct {
	stipendv1.UnimplementedCheckServiceServer
	d *daemon
	// Attempts of callers that bring no id of their own.
	own grant.Incarnation
	seq atomic.Uint64
}

// Check implements stipendv1.CheckServiceServer.
func (s *checkService) Check(ctx context.Context, m *stipendv1.CheckRequest) (*stipendv1.CheckResponse, error) {
	if len(m.GetIncarnation()) == 0 && m.GetSequence() == 0 && len(m.GetFingerprint()) == 0 {
		m.Incarnation, m.Sequence = s.own[:], s.seq.Add(1)
	}
	req, err := wire.FromUnaryCheckRequest(m)
	if err != nil {
		return nil, badRequest(err)
	}
	c := authority.Call{Check: &req}
	if req.Budget != wire.NoBudget {
		c.Deadline = deadline(s.d.clock().Mono, req.Budget)
	}
	a, err := s.d.ask(ctx, grant.PartitionOf(req.Tenant), c)
	if err != nil {
		return nil, err
	}
	ans := a.Check
	switch ans.Verdict {
	case grant.Allow, grant.Deny:
		return wire.ToCheckResponse(ans), nil
	case grant.Reject:
		switch ans.Reason {
		case grant.Conflict:
			return nil, faulty(ans.Reason, "the attempt id was used with other parameters")
		case grant.Invalid:
			return nil, faulty(ans.Reason, "a field is out of range")
		case grant.Stale:
			return nil, refuse(codes.FailedPrecondition, ans.Reason, "the attempt is older than what is remembered; draw a new id", 0)
		}
		return nil, refuse(codes.FailedPrecondition, ans.Reason, "the incarnation is "+ans.Reason.String(), 0)
	}
	return nil, undecided(ans.Reason, ans.RetryAfter)
}

// policyService changes and reads policies.
type policyService struct {
	stipendv1.UnimplementedPolicyServiceServer
	d *daemon
}

func tenantOf(s string) (grant.TenantID, error) {
	t := grant.TenantID(s)
	if err := t.Validate(); err != nil {
		return "", invalid(err.Error(), []grant.Problem{{Field: "tenant", Given: fmt.Sprintf("%d bytes", len(s)), Allowed: fmt.Sprintf("1 to %d bytes of UTF-8 without control characters", grant.MaxTenantLen)}})
	}
	return t, nil
}

// PutPolicy implements stipendv1.PolicyServiceServer.
func (s *policyService) PutPolicy(ctx context.Context, m *stipendv1.PutPolicyRequest) (*stipendv1.PutPolicyResponse, error) {
	t, err := tenantOf(m.GetTenant())
	if err != nil {
		return nil, err
	}
	policy, err := wire.FromPolicy(m.GetPolicy())
	if err != nil {
		return nil, badRequest(err)
	}
	a, err := s.d.ask(ctx, grant.PartitionOf(t), authority.Call{Put: &authority.PutPolicy{
		Tenant: t, Policy: policy, Expected: m.GetExpectedVersion(), AnyVersion: m.GetAnyVersion(),
	}})
	if err != nil {
		return nil, err
	}
	res := a.Put
	switch res.Reason {
	case grant.None:
		s.d.log.Info("policy changed", "tenant", t, "version", res.Version, "deleted", policy == nil, "unchanged", res.Unchanged)
		return &stipendv1.PutPolicyResponse{Version: res.Version, Warnings: res.Warnings, Unchanged: res.Unchanged}, nil
	case grant.VersionConflict:
		return nil, refuse(codes.FailedPrecondition, res.Reason,
			fmt.Sprintf("tenant %q has version %d, expected was %d", t, res.Version, m.GetExpectedVersion()), 0,
			&errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{{
				Type: "VERSION", Subject: string(t), Description: fmt.Sprintf("version %d", res.Version)}}})
	case grant.Invalid:
		return nil, invalid(wire.Problems(res.Problems).Error(), res.Problems)
	case grant.UnknownTenant:
		return nil, refuse(codes.NotFound, res.Reason, fmt.Sprintf("tenant %q has no policy", t), 0)
	}
	return nil, undecided(res.Reason, 0)
}

// GetPolicy implements stipendv1.PolicyServiceServer.
func (s *policyService) GetPolicy(ctx context.Context, m *stipendv1.GetPolicyRequest) (*stipendv1.GetPolicyResponse, error) {
	state, err := s.d.tenant(ctx, m.GetTenant())
	if err != nil {
		return nil, err
	}
	out := &stipendv1.GetPolicyResponse{Policy: wire.ToTenantPolicy(wire.TenantPolicy(state.VersionedPolicy))}
	if state.Policy != nil && !state.Deleted {
		out.Warnings = bounds.Warnings(state.Policy, 0)
	}
	return out, nil
}

func (d *daemon) tenant(ctx context.Context, name string) (*authority.TenantState, error) {
	t, err := tenantOf(name)
	if err != nil {
		return nil, err
	}
	a, err := d.ask(ctx, grant.PartitionOf(t), authority.Call{Get: &authority.GetTenant{Tenant: t}})
	if err != nil {
		return nil, err
	}
	switch a.Tenant.Reason {
	case grant.None:
		return a.Tenant, nil
	case grant.UnknownTenant:
		return nil, refuse(codes.NotFound, grant.UnknownTenant, fmt.Sprintf("tenant %q has no policy", t), 0)
	}
	return nil, undecided(a.Tenant.Reason, 0)
}

// pageSize reads the size of a page: 1 to 1000, 0 means 100.
func pageSize(n int32) (int, error) {
	if n < 0 || n > 1000 {
		return 0, invalid("page_size is out of range", []grant.Problem{{Field: "page_size", Given: fmt.Sprint(n), Allowed: "0 (means 100) to 1000"}})
	}
	if n == 0 {
		return 100, nil
	}
	return int(n), nil
}

// A page token is opaque to callers: the last item delivered.
func token(parts ...string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strings.Join(parts, "\x00")))
}

func readToken(s string) (before, after string, err error) {
	raw, err := base64.RawURLEncoding.DecodeString(s)
	before, after, found := strings.Cut(string(raw), "\x00")
	if err != nil || s != "" && !found {
		return "", "", invalid("page_token is not one of ours", []grant.Problem{{Field: "page_token", Given: "another text", Allowed: "empty, or what the last page returned"}})
	}
	return before, after, nil
}

// ListPolicies implements stipendv1.PolicyServiceServer: in order of
// partition, then tenant.
func (s *policyService) ListPolicies(ctx context.Context, m *stipendv1.ListPoliciesRequest) (*stipendv1.ListPoliciesResponse, error) {
	size, err := pageSize(m.GetPageSize())
	if err != nil {
		return nil, err
	}
	part, last, err := readToken(m.GetPageToken())
	if err != nil {
		return nil, err
	}
	from := 0
	if part != "" {
		if _, err := fmt.Sscanf(part, "%d", &from); err != nil || from < 0 || from >= grant.Partitions {
			return nil, invalid("page_token is not one of ours", nil)
		}
	}
	out := &stipendv1.ListPoliciesResponse{}
	after := grant.TenantID(last)
	for p := from; p < grant.Partitions; p++ {
		a, err := s.d.ask(ctx, grant.Partition(p), authority.Call{List: &authority.ListPolicies{After: after, Limit: size - len(out.Policies)}})
		if err != nil {
			return nil, err
		}
		if a.List.Reason != grant.None {
			return nil, undecided(a.List.Reason, 0)
		}
		for _, v := range a.List.Policies {
			out.Policies = append(out.Policies, wire.ToTenantPolicy(wire.TenantPolicy(v)))
			after = v.Tenant
		}
		if len(out.Policies) == size && (a.List.More || p < grant.Partitions-1) {
			if !a.List.More {
				p, after = p+1, ""
			}
			out.NextPageToken = token(fmt.Sprint(p), string(after))
			return out, nil
		}
		after = ""
	}
	return out, nil
}

// inspectService shows where units are.
type inspectService struct {
	stipendv1.UnimplementedInspectServiceServer
	d *daemon
}

// GetTenant implements stipendv1.InspectServiceServer.
func (s *inspectService) GetTenant(ctx context.Context, m *stipendv1.GetTenantRequest) (*stipendv1.GetTenantResponse, error) {
	state, err := s.d.tenant(ctx, m.GetTenant())
	if err != nil {
		return nil, err
	}
	out := &stipendv1.GetTenantResponse{
		Policy:        wire.ToTenantPolicy(wire.TenantPolicy(state.VersionedPolicy)),
		Ordinary:      toAccount(&state.Ordinary),
		Partition:     int32(state.Partition),
		LiveDecisions: int64(state.LiveDecisions),
	}
	if state.Emergency != nil {
		out.Emergency = toAccount(state.Emergency)
	}
	for _, r := range state.LastRefusals {
		out.LastRefusals = append(out.LastRefusals, &stipendv1.Refusal{
			Ago: durationpb.New(r.Ago), Path: r.Path, Reason: wire.ToReason(r.Reason), Cost: int64(r.Cost), RouteClass: string(r.Class), Owner: string(r.Owner),
		})
	}
	return out, nil
}

func toAccount(a *authority.AccountState) *stipendv1.Account {
	out := &stipendv1.Account{
		Level: int64(a.Level), Burst: int64(a.Burst), Outstanding: int64(a.Outstanding), Slack: int64(a.Slack), CheckCredit: int64(a.CheckCredit),
		Granted: int64(a.Granted), Checked: int64(a.Checked), Expired: int64(a.Expired), Discarded: int64(a.Discarded),
	}
	for _, o := range a.Owners {
		out.Owners = append(out.Owners, &stipendv1.OwnerHolding{
			Owner: string(o.Owner), Incarnation: o.Incarnation[:], State: o.State.String(), Outstanding: int64(o.Outstanding),
			ExpiresIn: durationpb.New(o.ExpiresIn), LastGrantId: uint64(o.LastGrant),
		})
	}
	for _, p := range a.Parked {
		out.Parked = append(out.Parked, &stipendv1.ParkedGrant{
			Owner: string(p.Owner), Incarnation: p.Incarnation[:], GrantId: uint64(p.ID), Min: int64(p.Min), Want: int64(p.Want),
			Waited: durationpb.New(p.Waited), Estimate: durationpb.New(p.Estimate),
		})
	}
	return out
}

// ListIncarnations implements stipendv1.InspectServiceServer: in order of
// owner, then incarnation.
func (s *inspectService) ListIncarnations(_ context.Context, m *stipendv1.ListIncarnationsRequest) (*stipendv1.ListIncarnationsResponse, error) {
	size, err := pageSize(m.GetPageSize())
	if err != nil {
		return nil, err
	}
	owner, inc, err := readToken(m.GetPageToken())
	if err != nil {
		return nil, err
	}
	all := s.d.registry.Snapshot()
	if m.GetPageToken() != "" {
		n := slices.IndexFunc(all, func(a authority.Member) bool {
			return string(a.Owner) > owner || string(a.Owner) == owner && a.Incarnation.String() > inc
		})
		if n < 0 {
			n = len(all)
		}
		all = all[n:]
	}
	out := &stipendv1.ListIncarnationsResponse{}
	for _, a := range all[:min(size, len(all))] {
		out.Incarnations = append(out.Incarnations, &stipendv1.Incarnation{Owner: string(a.Owner), Incarnation: a.Incarnation[:], State: a.State.String()})
	}
	if len(all) > size {
		out.NextPageToken = token(string(all[size-1].Owner), all[size-1].Incarnation.String())
	}
	return out, nil
}

// Fence implements stipendv1.InspectServiceServer.
func (s *inspectService) Fence(ctx context.Context, m *stipendv1.FenceRequest) (*stipendv1.FenceResponse, error) {
	inc, err := wire.FromIncarnation(m.GetIncarnation())
	if err != nil {
		return nil, badRequest(err)
	}
	err = s.d.registry.Fence(ctx, inc)
	if err == nil {
		err = s.d.router.settled(ctx, inc)
	}
	if err != nil {
		return nil, registryError(err)
	}
	s.d.log.Warn("incarnation fenced by an operator", "incarnation", inc)
	return &stipendv1.FenceResponse{}, nil
}
