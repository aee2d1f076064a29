package conf

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if strings.Contains(path, "rapid") || strings.Contains(path, "fuzz") {
			return
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "policies":
				return policiesStory(d)
			case "config":
				return configStory(d)
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

func policiesStory(d *datadriven.TestData) string {
	list, err := ParsePolicies("p.yaml", []byte(d.Input))
	if err != nil {
		if list != nil {
			return "policies beside an error"
		}
		return err.Error()
	}
	if len(list) == 0 {
		return "no tenants"
	}
	var b strings.Builder
	for _, one := range list {
		fmt.Fprintf(&b, "%s (%s", one.Tenant, one.At)
		if one.Strict {
			b.WriteString(", strict")
		}
		b.WriteString(")\n")
		for line := range strings.Lines(string(PolicyYAML(one.Policy))) {
			b.WriteString("  " + line)
		}
	}
	return b.String()
}

func units(t *rapid.T, label string, low, high grant.Units) grant.Units {
	return grant.Units(rapid.Int64Range(int64(low), int64(high)).Draw(t, label))
}

func drawRate(t *rapid.T) grant.Rate {
	if rapid.Bool().Draw(t, "no rate") {
		return grant.Rate{}
	}
	return grant.Rate{Units: units(t, "units", 0, grant.MaxUnits), Per: time.Duration(rapid.Int64Range(1, math.MaxInt64).Draw(t, "per"))}
}

func drawSettings(t *rapid.T) grant.GrantSettings {
	if rapid.Bool().Draw(t, "no grants") {
		return grant.GrantSettings{}
	}
	return grant.GrantSettings{
		Quantum: units(t, "quantum", 0, grant.MaxQuantum),
		Owners:  rapid.IntRange(0, grant.MaxOwners).Draw(t, "owners"),
		TTL:     time.Duration(rapid.Int64Range(int64(grant.MinTTL), int64(grant.MaxTTL)).Draw(t, "ttl")),
	}
}

// Names that YAML would take for something else are among those drawn.
func drawName(t *rapid.T) string {
	return rapid.OneOf(
		rapid.SampledFrom([]string{"true", "null", "1", "1.5", "0x1", "1e3", "no", "-", "2001-01-01", ".", "NaN", "_1", ".inf"}),
		rapid.StringMatching(`[A-Za-z0-9_.-]{1,64}`)).Draw(t, "name")
}

func drawPolicy(t *rapid.T) *grant.Policy {
	p := &grant.Policy{
		Rate:  drawRate(t),
		Burst: units(t, "burst", 0, grant.MaxUnits),
		Grant: drawSettings(t),
		Mode:  grant.Mode(rapid.IntRange(0, int(grant.Off)).Draw(t, "mode")),
	}
	if rapid.Bool().Draw(t, "has plan") {
		p.Plan = drawName(t)
	}
	if rapid.Bool().Draw(t, "has emergency") {
		p.Emergency = &grant.Emergency{Rate: drawRate(t), Burst: units(t, "burst", 0, 1000), Grant: drawSettings(t)}
	}
	for range rapid.IntRange(0, 5).Draw(t, "classes") {
		c := grant.Class{Central: rapid.Bool().Draw(t, "central"), Cost: units(t, "cost", 0, grant.MaxUnits)}
		if p.Burst > 0 {
			c.Cost = min(c.Cost, p.Burst)
		}
		if e := p.Emergency; e != nil && rapid.Bool().Draw(t, "emergency class") {
			c.Emergency, c.Cost = true, min(c.Cost, e.Grant.Quantum)
		}
		if p.Classes == nil {
			p.Classes = map[grant.RouteClass]grant.Class{}
		}
		p.Classes[grant.RouteClass(drawName(t))] = c
	}
	if found := p.Validate(); len(found) > 0 {
		t.Fatalf("the generator made a faulty policy: %v", found)
	}
	return p
}

// Every sound policy is written in a form that reads back as the same policy.
func TestPolicyYAMLRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		raw := PolicyYAML(p)
		back, err := ParsePolicy("p.yaml", raw)
		if err != nil {
			t.Fatalf("%s\n%v", raw, err)
		}
		if !reflect.DeepEqual(back, p) {
			t.Fatalf("%s\nwas  %+v\nread %+v", raw, p, back)
		}
		tenant := grant.TenantID(rapid.OneOf(rapid.Just("true"), rapid.Just("a: b"), rapid.Just("#"), rapid.Just("<<"),
			rapid.StringMatching(`[ -~é]{1,30}`)).Draw(t, "tenant"))
		list := []TenantPolicy{{Tenant: tenant, Policy: p, Strict: rapid.Bool().Draw(t, "strict")}}
		raw = PoliciesYAML(list)
		again, err := ParsePolicies("p.yaml", raw)
		if err != nil {
			t.Fatalf("%s\n%v", raw, err)
		}
		again[0].At = Position{}
		if !reflect.DeepEqual(again, list) {
			t.Fatalf("%s\nwas  %+v\nread %+v", raw, list, again)
		}
	})
}

// Rates read back exactly, whatever the numbers.
func TestRateRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRate(t)
		if back, err := ParseRate(FormatRate(r)); err != nil || back != r {
			t.Fatalf("%v is written %q and read %v, %v", r, FormatRate(r), back, err)
		}
	})
	for s, want := range map[string]grant.Rate{
		"100/s":         {Units: 100, Per: time.Second},
		"10 per 30s":    {Units: 10, Per: 30 * time.Second},
		"600 per 1m":    {Units: 600, Per: time.Minute},
		"5/m":           {Units: 5, Per: time.Minute},
		"1_000 / 500ms": {Units: 1000, Per: 500 * time.Millisecond},
		"0":             {},
		"0/s":           {Per: time.Second},
	} {
		if got, err := ParseRate(s); err != nil || got != want {
			t.Errorf("%q is read %v, %v", s, got, err)
		}
	}
}

// Case 29: a symlink swapped under the file, as Kubernetes does, yields the old
// or the new policies, and a file that is not there is an error, not no tenants.
func TestCase29PolicyFile(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	link := filepath.Join(dir, "policies.yaml")
	if list, err := LoadPolicies(link); err == nil {
		t.Fatalf("a file that is not there was read as %v", list)
	}
	for i, text := range []string{"tenants: {a: {rate: 1/s, burst: 1, classes: {}}}", "tenants: {b: {rate: 2/s, burst: 1, classes: {}}}"} {
		target := write(fmt.Sprintf("v%d", i), text)
		fresh := filepath.Join(dir, "fresh")
		if err := os.Symlink(target, fresh); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(fresh, link); err != nil {
			t.Fatal(err)
		}
		list, err := LoadPolicies(link)
		if err != nil || len(list) != 1 || list[0].Policy.Rate.Units != grant.Units(i+1) {
			t.Fatalf("%v, %v", list, err)
		}
	}
	if _, err := LoadPolicies(dir); err == nil {
		t.Fatal("a folder was read as a file")
	}
}

// For any bytes: no panic; a fault has a position in the file; what is accepted
// is sound and can be written and read again.
func FuzzPolicies(f *testing.F) {
	f.Add([]byte("strict: true\nplans:\n  pro:\n    rate: 600 per 1m\n    burst: 200\n    classes: {read: 1, write: {cost: 5, central: true}}\n    grant: {quantum: 10, owners: 8, ttl: 10s}\ntenants:\n  acme: {plan: pro, mode: shadow}\n"))
	f.Add([]byte("tenants: {a: {rate: 100/s, burst: 1.5, classes: {x: 010}}, a: {}}\n---\n"))
	f.Add([]byte("tenants:\n  a: &a {rate: !!int 1}\n  b: *a\n"))
	f.Add([]byte("? [a]\n: {<<: {b: c}}\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		list, err := ParsePolicies("p.yaml", raw)
		if err != nil {
			faults, ok := err.(Problems)
			if !ok || len(faults) == 0 || list != nil {
				t.Fatalf("%v beside %T %v", list, err, err)
			}
			for _, one := range faults {
				if one.At.Source != "p.yaml" || one.What == "" || strings.Contains(one.Error(), "\n") {
					t.Fatalf("incomplete: %+v", one)
				}
			}
			return
		}
		for _, one := range list {
			if found := one.Policy.Validate(); len(found) > 0 {
				t.Fatalf("accepted, but %v", found)
			}
		}
		again, err := ParsePolicies("p.yaml", PoliciesYAML(list))
		if err != nil {
			t.Fatalf("%s\n%v", PoliciesYAML(list), err)
		}
		for i := range again {
			if !reflect.DeepEqual(normal(again[i].Policy), normal(list[i].Policy)) || again[i].Tenant != list[i].Tenant {
				t.Fatalf("%+v\n%+v", again[i].Policy, list[i].Policy)
			}
		}
	})
}

// normal takes "no classes" for the same whether written or not.
func normal(p *grant.Policy) grant.Policy {
	c := *p
	if len(c.Classes) == 0 {
		c.Classes = nil
	}
	return c
}
