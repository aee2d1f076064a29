package main

import (
	"context"
	"encoding/json"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// register opens a link as an agent does; it stays open until the test ends.
func (a *running) register(owner string) grant.Incarnation {
	a.t.Helper()
	cc, err := grpc.NewClient(a.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	a.t.Cleanup(func() {
		cancel()
		cc.Close()
	})
	s, err := stipendv1.NewLinkServiceClient(cc).Link(ctx)
	if err != nil {
		a.t.Fatal(err)
	}
	inc := grant.NewIncarnation()
	if err := s.Send(&stipendv1.LinkRequest{Frame: &stipendv1.LinkRequest_Open{Open: &stipendv1.Open{Owner: owner, Incarnation: inc[:]}}}); err != nil {
		a.t.Fatal(err)
	}
	if f, err := s.Recv(); err != nil || f.GetWelcome() == nil {
		a.t.Fatalf("the first frame is %v, %v", f, err)
	}
	return inc
}

// TestIncarnationCommands proves that every incarnation is listed once with its
// state, whatever the page size, and that fence changes nothing without --yes
// and is final with it.
func TestIncarnationCommands(t *testing.T) {
	if testing.Short() {
		t.Skip("starts an authority with its etcd")
	}
	a := startAuthority(t, t.TempDir())
	out, _ := a.call(0, "incarnation", "list")
	wants(t, out, `^no incarnations; agents register when they reach the authority$`)
	out, _ = a.call(0, "incarnation", "list", "-o", "json")
	wants(t, out, `"incarnations": \[\],$`)

	one, two := a.register("gw-1"), a.register("gw-2")
	out, _ = a.call(0, "incarnation", "list")
	wants(t, out, `^OWNER +INCARNATION +STATE$`, `^gw-1 +`+one.String()+` +live$`, `^gw-2 +`+two.String()+` +live$`)

	_, errOut := a.call(1, "incarnation", "fence", one.String())
	wants(t, errOut, `This is final`, `undecided \(503\)$`, `until it is restarted`, `nothing was changed; add --yes to go on`)
	if states := a.states(); states[one.String()] != "live" {
		t.Errorf("without --yes the state became %q", states[one.String()])
	}
	out, _ = a.call(0, "incarnation", "fence", one.String(), "--yes")
	wants(t, out, `^incarnation `+one.String()+` is fenced`)
	out, _ = a.call(0, "incarnation", "fence", one.String(), "--yes", "-o", "json")
	wants(t, out, `"incarnation": "`+one.String()+`",$`, `"state": "fenced"$`)
	if states := a.states(); len(states) != 2 || states[one.String()] != "fenced" || states[two.String()] != "live" {
		t.Errorf("states %v; want the first fenced, the second live", states)
	}

	_, errOut = a.call(1, "incarnation", "fence", grant.NewIncarnation().String(), "--yes")
	wants(t, errOut, `stipend incarnation list shows those it knows$`)
	_, errOut = a.call(2, "incarnation", "fence", "gw-1", "--yes")
	wants(t, errOut, `"gw-1" has 4 characters; allowed are 32 hexadecimal digits; stipend incarnation list shows them`)
	_, errOut = a.call(2, "incarnation", "list", "--page-size", "5000")
	wants(t, errOut, `page_size: 5000; allowed: `)
	out, _ = a.call(0, "incarnation", "list", "--page-size", "1")
	wants(t, out, `^there are more: stipend incarnation list --page-size 1 --page \S+$`)
}

// states lists all incarnations, one to a page, each of them once.
func (a *running) states() map[string]string {
	a.t.Helper()
	all := map[string]string{}
	for page := ""; ; {
		out, _ := a.call(0, "incarnation", "list", "--page-size", "1", "--page", page, "-o", "json")
		var got struct {
			Incarnations []incarnationJSON `json:"incarnations"`
			Next         string            `json:"next_page"`
		}
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			a.t.Fatal(err)
		}
		for _, one := range got.Incarnations {
			if _, twice := all[one.Incarnation]; twice {
				a.t.Fatalf("incarnation %s is on two pages", one.Incarnation)
			}
			all[one.Incarnation] = one.State
		}
		if page = got.Next; page == "" {
			return all
		}
	}
}
