package sim

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

var grantsFlag = flag.Int("grants", 20_000, "how many grants TestMillionGrants makes")

// Many grants whose requests and answers are lost, duplicated, late and
// reordered: none is deducted twice, none is credited twice.
func TestMillionGrants(t *testing.T) {
	cfg := DefaultConfig(1_000_000)
	cfg.Net = NetConfig{Latency: 2 * time.Millisecond, Jitter: 4 * time.Millisecond,
		LossPPM: 50_000, DupPPM: 200_000, LatePPM: 200_000, Late: 3 * time.Second, BreakEvery: 20 * time.Second}
	cfg.Disk.UnknownPPM = 50
	w := newWorld(t, cfg, 8)
	const tenants = 16
	for i := range tenants {
		id := grant.TenantID(fmt.Sprintf("tenant-%d", i))
		w.Center.Put(id, policy(4000, 4000, 5, 8, 2*time.Second), nil)
		run(t, w, 10*time.Millisecond)
		// Every request takes a whole grant.
		w.Offer(Load{Tenant: id, Class: "five", Every: Poisson(100), At: Evenly(8), Budget: 20 * time.Millisecond})
	}
	count := func() (grants, credited, replayed uint64, units grant.Units) {
		for i := range tenants {
			c := w.Judge.Tenant(grant.TenantID(fmt.Sprintf("tenant-%d", i)))
			for _, l := range c.grants { // sums only: the order does not matter
				grants += uint64(len(l.granted))
				for _, g := range l.granted {
					units += g.units
				}
			}
			credited += c.Counts.GrantsCredited
		}
		for _, p := range w.Center.order {
			replayed += w.Center.nodes[p].Stats().Replays
		}
		return grants, credited, replayed, units
	}
	grants, credited, replayed, units := count()
	for grants < uint64(*grantsFlag) {
		run(t, w, time.Second)
		grants, credited, replayed, units = count()
	}
	held(t, w) // the Judge fails the run at the first id that is deducted or credited twice

	var requests, retries, ignored uint64
	var spent, dropped grant.Units
	for _, g := range w.Gateways() {
		for _, e := range g.order {
			s := e.Stats()
			requests, retries, ignored = requests+s.Requests, retries+s.Retries, ignored+s.Ignored
			spent, dropped = spent+s.Spent, dropped+sumDrops(s.Dropped)
		}
	}
	if retries == 0 || ignored == 0 || replayed == 0 || w.Traffic.Lost == 0 {
		t.Errorf("%d retries, %d answers ignored, %d replays, %d messages lost: the network was too good", retries, ignored, replayed, w.Traffic.Lost)
	}
	var out strings.Builder
	tw := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	for _, row := range []struct {
		what string
		n    any
	}{
		{"grants deducted durably", grants},
		{"units deducted", units},
		{"deducted twice", w.Judge.DeductedTwice},
		{"grants credited", credited},
		{"credited twice", w.Judge.CreditedTwice},
		{"granted, never credited (answer lost or too late)", grants - credited},
		{"units spent", spent},
		{"units dropped by agents", dropped},
		{"grant requests of agents", requests},
		{"repeated by agents", retries},
		{"answered from memory by the authority", replayed},
		{"answers ignored by agents", ignored},
		{"messages sent", w.Traffic.Sent},
		{"messages lost", w.Traffic.Lost},
		{"messages duplicated", w.Traffic.Duplicated},
		{"messages late or out of order", w.Traffic.Late},
		{"virtual time", time.Duration(w.Now()).Round(time.Second)},
	} {
		fmt.Fprintf(tw, "%s\t%v\n", row.what, row.n)
	}
	tw.Flush()
	t.Logf("seed %d\n%s", cfg.Seed, out.String())
}
