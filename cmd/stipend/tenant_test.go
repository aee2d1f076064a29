package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
	"github.com/stipend/stipend/proto/wire"
)

// shown is a tenant with something of everything, in long numbers.
func shown() (wire.TenantPolicy, *stipendv1.GetTenantResponse) {
	p := &grant.Policy{
		Plan: "enterprise", Mode: grant.Shadow, Rate: grant.Rate{Units: 1_000_000, Per: time.Minute}, Burst: 2_000_000,
		Classes: map[grant.RouteClass]grant.Class{"read": {Cost: 1}, "search": {Cost: 20}, "write": {Cost: 5, Central: true}, "upload": {Cost: 50}, "export": {Cost: 1000}, "login": {Cost: 2, Emergency: true}},
		Grant:   grant.GrantSettings{Quantum: 10_000, Owners: 32, TTL: time.Minute},
	}
	inc := bytes.Repeat([]byte{0xab}, 16)
	account := &stipendv1.Account{
		Level: 1_999_999, Burst: 2_000_000, Outstanding: 30_000, Slack: 320_000, CheckCredit: 12, Granted: 1 << 53, Checked: 7,
		Owners: []*stipendv1.OwnerHolding{{Owner: "gw-eu-west-1-a", Incarnation: inc, State: "superseded", Outstanding: 10_000, ExpiresIn: durationpb.New(59500 * time.Millisecond), LastGrantId: 9}},
		Parked: []*stipendv1.ParkedGrant{{Owner: "gw-eu-west-1-a", Incarnation: inc, GrantId: 10, Min: 1, Want: 10_000, Waited: durationpb.New(1500 * time.Millisecond), Estimate: durationpb.New(time.Minute)}},
	}
	return wire.TenantPolicy{Tenant: "acme", Version: 3, Policy: p}, &stipendv1.GetTenantResponse{
		Ordinary: account, Partition: 63,
		LastRefusals: []*stipendv1.Refusal{
			{Ago: durationpb.New(1500 * time.Millisecond), Path: "check", Reason: stipendv1.Reason_REASON_COST_EXCEEDS_BURST, Cost: 1000, RouteClass: "export", Owner: "gw-eu-west-1-a"},
			{Ago: durationpb.New(2 * time.Hour), Path: "grant", Reason: stipendv1.Reason_REASON_RATE, Cost: 1},
			{Path: "grant", Reason: 99},
		},
	}
}

// TestTenantForPeople proves that tenant show names mode, classes with costs
// and the reasons of refusals with their meaning, on lines that fit a terminal.
func TestTenantForPeople(t *testing.T) {
	policy, got := shown()
	var out bytes.Buffer
	if err := writeTenant(&out, policy.Policy, toTenantStateJSON(policy, got)); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	wants(t, out.String(), `^mode shadow, plan enterprise: refusals are counted, and pass$`, `^rate r = 1000000 per 1m, burst B = 2000000$`,
		`^owners N = 32, quantum q = 10000, ttl 1m$`, `^classes and their costs: export 1000, login 2 \(emergency\), read 1,`, `write 5 \(central\)$`,
		`^  gw-eu-west-1-a  superseded  10000    59.5s    (ab){16}$`, `^  1\.5s +check +cost-exceeds-burst +export +1000 +gw-eu-west-1-a$`,
		`^  cost-exceeds-burst: +the request costs more than B and can never pass$`, `^  rate: +the bucket holds too little`, `reason-99`)

	got.LastRefusals = nil
	out.Reset()
	if err := writeTenant(&out, policy.Policy, toTenantStateJSON(policy, got)); err != nil {
		t.Fatal(err)
	}
	wants(t, out.String(), `^last refusals at the authority: none$`)
}

// TestTenantForScripts proves the notation of all -o json on the one answer
// that has everything: numbers are numbers, words lower-case, incarnations hex
// digits, durations strings, and nothing that is a list is null.
func TestTenantForScripts(t *testing.T) {
	policy, got := shown()
	raw, err := json.Marshal(toTenantStateJSON(policy, got))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`"tenant":"acme","version":3,"deleted":false,"policy":{"plan":"enterprise","mode":"shadow","rate":"1000000 per 1m","burst":2000000,`,
		`"ordinary":{"level":1999999,"burst":2000000,`, `"granted":9007199254740992,`, `"emergency":null`,
		`{"owner":"gw-eu-west-1-a","incarnation":"abababababababababababababababab","state":"superseded","outstanding":10000,"expires_in":"59.5s","last_grant_id":9}`,
		`"grant_id":10,"min":1,"want":10000,"waited":"1.5s","estimate":"1m"}`,
		`{"ago":"1.5s","path":"check","reason":"cost-exceeds-burst","cost":1000,"route_class":"export","owner":"gw-eu-west-1-a"}`,
		`{"ago":"2h","path":"grant","reason":"rate","cost":1,"route_class":"","owner":""}`,
	} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("no %s in\n%s", want, raw)
		}
	}
	raw, err = json.Marshal(toTenantStateJSON(policy, &stipendv1.GetTenantResponse{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"owners":[]`, `"parked":[]`, `"last_refusals":[]`} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("no %s in\n%s", want, raw)
		}
	}
}
