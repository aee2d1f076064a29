package wire

import (
	"bytes"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// NoBudget is the budget of a unary Check that names none: only the deadline
// of the call itself counts.
const NoBudget = time.Duration(math.MaxInt64)

// ToCheckRequest makes the message for a link; Sum must have been computed. A
// spent budget goes out as zero.
func ToCheckRequest(r *grant.CheckRequest) *stipendv1.CheckRequest {
	box := new(struct {
		m      stipendv1.CheckRequest
		budget durationpb.Duration
		sum    grant.Fingerprint
	})
	box.sum = r.Sum
	m := &box.m
	m.Tenant = string(r.Tenant)
	m.RouteClass = string(r.Class)
	m.Count = int64(r.Count)
	m.Sequence = r.Attempt.Seq
	m.Fingerprint = box.sum[:]
	m.Budget = setDuration(&box.budget, max(r.Budget, 0))
	m.KnownVersion = r.KnownVersion
	return m
}

// ToUnaryCheckRequest is ToCheckRequest with the incarnation in the message.
func ToUnaryCheckRequest(r *grant.CheckRequest) *stipendv1.CheckRequest {
	m := ToCheckRequest(r)
	m.Incarnation = bytes.Clone(r.Attempt.Incarnation[:])
	return m
}

// FromCheckRequest reads a request that came over the link of incarnation inc.
// The message may repeat the incarnation but name no other.
func FromCheckRequest(m *stipendv1.CheckRequest, inc grant.Incarnation) (grant.CheckRequest, error) {
	if m == nil {
		return grant.CheckRequest{}, missing("check request")
	}
	if len(m.Incarnation) != 0 && !bytes.Equal(m.Incarnation, inc[:]) {
		return grant.CheckRequest{}, problem("incarnation", "another one than the link's", "nothing, or the link's own "+inc.String())
	}
	if m.Budget == nil {
		return grant.CheckRequest{}, problem("budget", "nothing", "the time left to decide")
	}
	return fromCheckRequest(m, inc, true)
}

// FromUnaryCheckRequest reads a request of a caller without a link. It must
// name its incarnation; it may leave out the fingerprint, which is computed
// then, and the budget, which is NoBudget then.
func FromUnaryCheckRequest(m *stipendv1.CheckRequest) (grant.CheckRequest, error) {
	if m == nil {
		return grant.CheckRequest{}, missing("check request")
	}
	inc, err := FromIncarnation(m.Incarnation)
	if err != nil {
		return grant.CheckRequest{}, err
	}
	r, err := fromCheckRequest(m, inc, len(m.Fingerprint) != 0)
	if err == nil && m.Budget == nil {
		r.Budget = NoBudget
	}
	return r, err
}

// fromCheckRequest compares the fingerprint only when told: it is computed
// from the parameters in any case.
func fromCheckRequest(m *stipendv1.CheckRequest, inc grant.Incarnation, compare bool) (grant.CheckRequest, error) {
	r := grant.CheckRequest{Attempt: grant.Attempt{Incarnation: inc, Seq: m.Sequence}, KnownVersion: m.KnownVersion}
	var err error
	if r.Tenant, err = fromTenant(m.Tenant); err != nil {
		return grant.CheckRequest{}, err
	}
	if r.Class, err = fromClass("route_class", m.RouteClass); err != nil {
		return grant.CheckRequest{}, err
	}
	if r.Count, err = fromUnits("count", m.Count, 0, grant.MaxUnits); err != nil {
		return grant.CheckRequest{}, err
	}
	if r.Attempt.Seq == 0 {
		return grant.CheckRequest{}, problem("sequence", 0, "1 or more")
	}
	if r.Budget, err = fromDuration("budget", m.Budget); err != nil {
		return grant.CheckRequest{}, err
	}
	r.Sum = r.Fingerprint()
	if compare {
		if err := testSum(m.Fingerprint, r.Sum); err != nil {
			return grant.CheckRequest{}, err
		}
	}
	return r, nil
}

// ToCheckResponse makes the message of the answer.
func ToCheckResponse(a *grant.CheckAnswer) *stipendv1.CheckResponse {
	box := new(struct {
		m                 stipendv1.CheckResponse
		retry, affordable durationpb.Duration
	})
	m := &box.m
	m.Tenant = string(a.Tenant)
	m.Sequence = a.Attempt.Seq
	m.Verdict = ToVerdict(a.Verdict)
	m.Reason = ToReason(a.Reason)
	m.Cost = int64(a.Cost)
	m.RetryAfter = optional(&box.retry, a.RetryAfter)
	m.Affordable = optional(&box.affordable, a.Affordable)
	m.Replayed = a.Replayed
	m.Shadow = a.Shadow
	m.Remaining = int64(a.Remaining)
	m.Policy = ToPolicyCopy(a.Policy)
	return m
}

// FromCheckResponse reads an answer to a Check of incarnation inc.
func FromCheckResponse(m *stipendv1.CheckResponse, inc grant.Incarnation) (grant.CheckAnswer, error) {
	if m == nil {
		return grant.CheckAnswer{}, missing("check response")
	}
	a := grant.CheckAnswer{
		Attempt:  grant.Attempt{Incarnation: inc, Seq: m.Sequence},
		Replayed: m.Replayed,
		Shadow:   m.Shadow,
	}
	var err error
	if a.Tenant, err = fromTenant(m.Tenant); err != nil {
		return grant.CheckAnswer{}, err
	}
	if a.Attempt.Seq == 0 {
		return grant.CheckAnswer{}, problem("sequence", 0, "1 or more")
	}
	if a.Verdict, err = FromVerdict(m.Verdict); err != nil {
		return grant.CheckAnswer{}, err
	}
	if a.Reason, err = FromReason(m.Reason); err != nil {
		return grant.CheckAnswer{}, err
	}
	if a.Cost, err = fromUnits("cost", m.Cost, 0, grant.MaxUnits); err != nil {
		return grant.CheckAnswer{}, err
	}
	if a.RetryAfter, err = fromDuration("retry_after", m.RetryAfter); err != nil {
		return grant.CheckAnswer{}, err
	}
	if a.Affordable, err = fromDuration("affordable", m.Affordable); err != nil {
		return grant.CheckAnswer{}, err
	}
	if a.Remaining, err = fromUnits("remaining", m.Remaining, 0, grant.MaxUnits); err != nil {
		return grant.CheckAnswer{}, err
	}
	if a.Policy, err = FromPolicyCopy(m.Policy); err != nil {
		return grant.CheckAnswer{}, err
	}
	return a, nil
}
