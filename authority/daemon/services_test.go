package daemon

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

func wants(t *testing.T, what string, err error, code codes.Code, why grant.Reason) {
	t.Helper()
	if status.Code(err) != code || reasonOf(err) != why.String() {
		t.Errorf("%s: %v with reason %q; want %v with %q", what, err, reasonOf(err), code, why)
	}
}

// Policies: versions count up, an expected version that is another one is
// refused, equal content changes nothing, and every faulty field is named.
func TestPolicies(t *testing.T) {
	r := sharedDaemon(t)
	ctx := ctxOf(t)
	p := slowPolicy()
	put := func(expected uint64) (*stipendv1.PutPolicyResponse, error) {
		return r.policies.PutPolicy(ctx, &stipendv1.PutPolicyRequest{Tenant: "pol", Policy: wire.ToPolicy(p), ExpectedVersion: expected})
	}
	first, err := put(0)
	if err != nil || first.Version == 0 {
		t.Fatalf("first: %v, %v", first, err)
	}
	if same, err := put(first.Version); err != nil || !same.Unchanged || same.Version != first.Version {
		t.Errorf("the same content: %v, %v", same, err)
	}
	p.Burst = 60
	_, err = put(first.Version + 7)
	wants(t, "another version", err, codes.FailedPrecondition, grant.VersionConflict)
	second, err := put(first.Version)
	if err != nil || second.Version <= first.Version {
		t.Errorf("second: %v, %v", second, err)
	}
	if len(second.GetWarnings()) == 0 { // N*q = 80 at one unit an hour
		t.Error("a policy that cannot keep the utilisation promise brought no warning")
	}
	got, err := r.policies.GetPolicy(ctx, &stipendv1.GetPolicyRequest{Tenant: "pol"})
	if err != nil || got.Policy.Version != second.Version || !proto.Equal(got.Policy.Policy, wire.ToPolicy(p)) {
		t.Errorf("get: %v, %v", got, err)
	}

	_, err = r.policies.PutPolicy(ctx, &stipendv1.PutPolicyRequest{Tenant: "pol", AnyVersion: true, Policy: &stipendv1.Policy{
		Burst: 5, Classes: []*stipendv1.RouteClass{{Name: "x", Cost: 6}}, Grant: &stipendv1.GrantSettings{Quantum: -1},
	}})
	wants(t, "case 9: a class dearer than the burst", err, codes.InvalidArgument, grant.Invalid)
	var fields []string
	for _, d := range status.Convert(err).Details() {
		if b, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range b.FieldViolations {
				fields = append(fields, v.Field)
			}
		}
	}
	if all := strings.Join(fields, " "); !strings.Contains(all, "classes.x.cost") || !strings.Contains(all, "grant.quantum") {
		t.Errorf("faulty fields named: %q", all)
	}
	for _, name := range []string{"", strings.Repeat("x", 257), "a\x00b"} { // case 28
		_, err = r.policies.GetPolicy(ctx, &stipendv1.GetPolicyRequest{Tenant: name})
		wants(t, fmt.Sprintf("tenant of %d bytes", len(name)), err, codes.InvalidArgument, grant.Invalid)
	}
	_, err = r.policies.GetPolicy(ctx, &stipendv1.GetPolicyRequest{Tenant: "nobody"})
	wants(t, "an unknown tenant", err, codes.NotFound, grant.UnknownTenant)
}

// Pages of policies bring every tenant once, whatever the size of the page.
func TestListPolicies(t *testing.T) {
	r := sharedDaemon(t)
	want := map[string]bool{}
	for n := range 25 {
		name := fmt.Sprintf("list-%d", n)
		r.put(name, slowPolicy())
		want[name] = true
	}
	for _, size := range []int32{1, 7, 0} {
		seen := map[string]int{}
		for token := ""; ; {
			page, err := r.policies.ListPolicies(ctxOf(t), &stipendv1.ListPoliciesRequest{PageSize: size, PageToken: token})
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range page.Policies {
				seen[p.Tenant]++
			}
			if token = page.NextPageToken; token == "" {
				break
			}
		}
		for name := range want {
			if seen[name] != 1 {
				t.Errorf("pages of %d: %s came %d times", size, name, seen[name])
			}
		}
	}
	_, err := r.policies.ListPolicies(ctxOf(t), &stipendv1.ListPoliciesRequest{PageToken: "no token"})
	wants(t, "a foreign token", err, codes.InvalidArgument, grant.Invalid)
	_, err = r.policies.ListPolicies(ctxOf(t), &stipendv1.ListPoliciesRequest{PageSize: 1001})
	wants(t, "a page too large", err, codes.InvalidArgument, grant.Invalid)
}

// Case 30 and the unary contract: an allowed attempt is replayed and paid once,
// a denial is an answer and never replayed, other parameters are refused.
func TestUnaryCheck(t *testing.T) {
	r := sharedDaemon(t)
	r.put("unary", slowPolicy())
	ctx := ctxOf(t)
	inc := grant.NewIncarnation()
	req := &stipendv1.CheckRequest{Tenant: "unary", RouteClass: "big", Count: 1, Incarnation: inc[:], Sequence: 1}
	first, err := r.checks.Check(ctx, req)
	if err != nil || first.Verdict != stipendv1.Verdict_VERDICT_ALLOW || first.Remaining != 50 || first.Replayed {
		t.Fatalf("first: %v, %v", first, err)
	}
	again, err := r.checks.Check(ctx, req)
	if err != nil || again.Verdict != stipendv1.Verdict_VERDICT_ALLOW || !again.Replayed {
		t.Errorf("again: %v, %v", again, err)
	}
	_, err = r.checks.Check(ctx, &stipendv1.CheckRequest{Tenant: "unary", RouteClass: "big", Count: 2, Incarnation: inc[:], Sequence: 1})
	wants(t, "another cost under the same id", err, codes.InvalidArgument, grant.Conflict)
	// Without an id the authority draws one: both are paid.
	for n, want := range []stipendv1.Verdict{stipendv1.Verdict_VERDICT_ALLOW, stipendv1.Verdict_VERDICT_DENY} {
		ans, err := r.checks.Check(ctx, &stipendv1.CheckRequest{Tenant: "unary", RouteClass: "big", Count: 1})
		if err != nil || ans.Verdict != want {
			t.Errorf("own id %d: %v, %v; want %v", n, ans, err, want)
		}
		if want == stipendv1.Verdict_VERDICT_DENY && (ans.GetReason() != stipendv1.Reason_REASON_RATE || ans.GetRetryAfter() == nil) {
			t.Errorf("the denial: %v", ans)
		}
	}
	if state := r.tenant("unary"); state.Ordinary.Level != 0 || state.Ordinary.Checked != 100 || len(state.LastRefusals) == 0 {
		t.Errorf("level %d, checked %d, %d refusals; want 0, 100 and some", state.Ordinary.Level, state.Ordinary.Checked, len(state.LastRefusals))
	}
	_, err = r.checks.Check(ctx, &stipendv1.CheckRequest{Tenant: "unary", RouteClass: "/raw/url", Count: -1})
	wants(t, "faulty fields", err, codes.InvalidArgument, grant.Invalid)
	ans, err := r.checks.Check(ctx, &stipendv1.CheckRequest{Tenant: "nobody", RouteClass: "big", Count: 1})
	if err != nil || ans.Verdict != stipendv1.Verdict_VERDICT_DENY || ans.Reason != stipendv1.Reason_REASON_UNKNOWN_TENANT {
		t.Errorf("an unknown tenant: %v, %v", ans, err)
	}
}

// Deadline passed = refused before deducting, on both paths.
func TestDeadlinePassed(t *testing.T) {
	r := sharedDaemon(t)
	r.put("late", slowPolicy())
	a := r.mustLink("late-gw", grant.NewIncarnation())
	late := a.check(a.checkRequest("late", "read", 1, 0))[0]
	if late.Verdict != stipendv1.Verdict_VERDICT_UNDECIDED || late.Reason != stipendv1.Reason_REASON_DEADLINE {
		t.Errorf("link: %v", late)
	}
	r2 := &grant.CheckRequest{Tenant: "late", Class: "read", Count: 1, Attempt: grant.Attempt{Incarnation: grant.NewIncarnation(), Seq: 1}}
	r2.Sum = r2.Fingerprint()
	_, err := r.checks.Check(ctxOf(t), wire.ToUnaryCheckRequest(r2))
	wants(t, "unary", err, codes.DeadlineExceeded, grant.Deadline)
	if level := r.tenant("late").Ordinary.Level; level != 100 {
		t.Errorf("level %d; want nothing deducted", level)
	}
	if in := a.check(a.checkRequest("late", "read", 2, time.Minute))[0]; in.Verdict != stipendv1.Verdict_VERDICT_ALLOW {
		t.Errorf("in time: %v", in)
	}
}

// Health is told per service, reflection answers, and /readyz agrees.
func TestHealth(t *testing.T) {
	r := sharedDaemon(t)
	h := healthpb.NewHealthClient(r.conn)
	for _, s := range append([]string{""}, services...) {
		got, err := h.Check(ctxOf(t), &healthpb.HealthCheckRequest{Service: s})
		if err != nil || got.Status != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
	if code, body := r.get("/readyz"); code != 200 || body != "ready\n" {
		t.Errorf("/readyz: %d %q", code, body)
	}
	if code, _ := r.get("/healthz"); code != 200 {
		t.Errorf("/healthz: %d", code)
	}
}

// The metrics have the form that Prometheus asks for, show zeros from the start
// and name no tenant.
func TestMetrics(t *testing.T) {
	r := sharedDaemon(t)
	r.put("metrics-tenant", slowPolicy())
	_, body := r.get("/metrics")
	for _, want := range []string{
		`stipend_authority_grants_total{result="busy"}`,
		`stipend_authority_checks_total{verdict="allow"}`,
		`stipend_authority_check_reasons_total{reason="cost-exceeds-burst"}`,
		`stipend_authority_units_total{fate="expired"}`,
		`stipend_authority_incarnations{state="fenced"}`,
		`stipend_authority_commit_duration_seconds_bucket{le="0.0001"}`,
		`stipend_authority_link_refusals_total{reason="superseded"} `,
		`stipend_authority_ready 1`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(body, "metrics-tenant") {
		t.Error("a tenant's name is a label")
	}
}

func TestMetricsLint(t *testing.T) {
	pedantic := prometheus.NewPedanticRegistry()
	d := &daemon{metrics: newMetrics("test"), router: newRouter(slog.Default())}
	pedantic.MustRegister(append(d.metrics.all, d)...)
	families, err := pedantic.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, namespace) {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

// Operators see incarnations in pages and end one for good.
func TestFence(t *testing.T) {
	r := sharedDaemon(t)
	r.put("fence", slowPolicy())
	a := r.mustLink("fence-gw", grant.NewIncarnation())
	if got := a.ask(a.request("fence", 1, 20, 0)); got.Result != stipendv1.GrantResult_GRANT_RESULT_GRANTED {
		t.Fatalf("grant: %v", got)
	}
	if _, err := r.inspect.Fence(ctxOf(t), &stipendv1.FenceRequest{Incarnation: a.inc[:]}); err != nil {
		t.Fatal(err)
	}
	a.until("the fate", func() bool { return a.fate != 0 })
	if a.fate != stipendv1.Reason_REASON_FENCED {
		t.Errorf("fate %v", a.fate)
	}
	if got := a.ask(a.request("fence", 2, 20, 20)); got.Result != stipendv1.GrantResult_GRANT_RESULT_REFUSED || got.Reason != stipendv1.Reason_REASON_FENCED {
		t.Errorf("a grant afterwards: %v", got)
	}
	if got := a.check(a.checkRequest("fence", "read", 1, time.Minute))[0]; got.Verdict != stipendv1.Verdict_VERDICT_REJECT {
		t.Errorf("a check afterwards: %v", got)
	}
	if out := r.tenant("fence").Ordinary.Outstanding; out != 20 {
		t.Errorf("outstanding %d: a fence frees nothing", out)
	}
	stranger := grant.NewIncarnation()
	_, err := r.inspect.Fence(ctxOf(t), &stipendv1.FenceRequest{Incarnation: stranger[:]})
	wants(t, "fence of an unknown one", err, codes.NotFound, grant.UnknownSession)

	found := ""
	for token := ""; ; {
		page, err := r.inspect.ListIncarnations(ctxOf(t), &stipendv1.ListIncarnationsRequest{PageSize: 1, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range page.Incarnations {
			if i.Owner == "fence-gw" {
				found += i.State
			}
		}
		if token = page.NextPageToken; token == "" {
			break
		}
	}
	if found != "fenced" {
		t.Errorf("listed as %q", found)
	}
}
