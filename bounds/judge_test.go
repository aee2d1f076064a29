package bounds

import (
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Tenants are judged apart, in order of their ids, and their number is bounded
// (cases 27 and 28).
func TestJudge(t *testing.T) {
	j, err := NewJudge(Config{}, 3, policy(1, time.Second, 2))
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Change("own", 0, policy(1, time.Second, 10)); err != nil {
		t.Fatal(err)
	}
	for _, a := range []struct {
		tenant grant.TenantID
		at     grant.Instant
		cost   grant.Units
	}{{"b:c", 100, 2}, {"a", 50, 3}, {"b:c", 100, 0}, {"own", 10, 10}} {
		if err := j.Admit(a.tenant, a.at, a.cost); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.Admit("fourth", 100, 1); err == nil || !strings.Contains(err.Error(), "allowed: 3 tenants") {
		t.Errorf("a fourth tenant: %v", err)
	}
	if err := j.Admit("b:c", 99, 1); err == nil || !strings.Contains(err.Error(), `"b:c"`) {
		t.Errorf("a step back: %v", err)
	}
	if err := j.Advance(100); err != nil {
		t.Fatal(err)
	}
	if j.Held() {
		t.Error("a is over its bound")
	}
	got := j.Reports()
	if len(got) != 3 || got[0].Tenant != "a" || got[0].Held || !got[1].Held || !got[2].Held || got[2].Last != 100 {
		t.Errorf("%+v", got)
	}
	j, _ = NewJudge(Config{}, 1, nil)
	for _, id := range []grant.TenantID{"", "a\x00b", grant.TenantID(strings.Repeat("x", 1<<20))} {
		if err := j.Admit(id, 0, 1); err == nil {
			t.Errorf("tenant of %d bytes was taken", len(id))
		}
	}
	if err := j.Admit("t", 0, 1); err != nil || j.Held() {
		t.Errorf("without a policy nothing may be admitted: %v", err)
	}
	if _, err := NewJudge(Config{}, 0, nil); err == nil {
		t.Error("no tenants at all")
	}
}

func BenchmarkAdmit(b *testing.B) {
	c, _ := NewChecker(Config{RhoPPB: 1_000_000, Skew: time.Millisecond})
	c.Change(always, granting(policy(10_000, time.Second, 1000), 100, 32, 10*time.Second))
	var at grant.Instant
	for b.Loop() {
		at += 100_000
		if err := c.Admit(at, 1); err != nil {
			b.Fatal(err)
		}
	}
}
