package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

func newIncarnation(o *output) *cobra.Command {
	conn := &connection{}
	c := &cobra.Command{
		Use:   "incarnation",
		Short: "List the incarnations of agents, and fence one",
		Long: `Each life of an agent is an incarnation, drawn at its start. Units are granted to
incarnations, not to names: a gateway that comes back is another one.`,
		Example: `  stipend incarnation list
  stipend incarnation fence 4f1c0e2ad96b4b0f8a3e5d7c9b216f08          only say what would happen
  stipend incarnation fence 4f1c0e2ad96b4b0f8a3e5d7c9b216f08 --yes`,
	}
	conn.register(c.PersistentFlags())
	commands(c, newIncarnationList(o, conn), newIncarnationFence(o, conn))
	return c
}

// incarnationJSON is one incarnation in -o json.
type incarnationJSON struct {
	Owner       string `json:"owner"`
	Incarnation string `json:"incarnation"` // 32 hexadecimal digits
	State       string `json:"state"`
}

func newIncarnationList(o *output, conn *connection) *cobra.Command {
	var page int32
	var token string
	c := &cobra.Command{
		Use:   "list",
		Short: "List the incarnations that the authority remembers, page by page",
		Long: `Lists incarnations in order of owner. States:

  live        its lease is kept alive
  lost        its lease ended; what it holds is free when its grants expire, and it
              may come back
  superseded  another incarnation bears its name; it gets nothing any more
  discarded   it closed its wallets and gave its room back; final
  fenced      an operator ended it; final`,
		Example: `  stipend incarnation list                      everything, fetched in pages
  stipend incarnation list --page-size 50       one page; its end says how to go on
  stipend incarnation list -o json | jq -r '.incarnations[] | select(.state == "lost").owner'`,
		Args: exactly(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			one := c.Flags().Changed("page-size") || token != ""
			list := []incarnationJSON{}
			next := token
			err := conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				client := stipendv1.NewInspectServiceClient(cc)
				for {
					got, err := client.ListIncarnations(ctx, &stipendv1.ListIncarnationsRequest{PageSize: page, PageToken: next})
					if err != nil {
						return err
					}
					for _, m := range got.GetIncarnations() {
						list = append(list, incarnationJSON{m.GetOwner(), hex.EncodeToString(m.GetIncarnation()), m.GetState()})
					}
					if next = got.GetNextPageToken(); next == "" || one {
						return nil
					}
				}
			})
			if err != nil {
				return err
			}
			return writeIncarnations(c.OutOrStdout(), o, list, page, next)
		},
	}
	c.Flags().Int32Var(&page, "page-size", 1000, "incarnations of one page, 1 to 1000")
	c.Flags().StringVar(&token, "page", "", "`token` of the page, from the end of the one before")
	return c
}

func writeIncarnations(w io.Writer, o *output, list []incarnationJSON, page int32, next string) error {
	if o.json() {
		return writeJSON(w, struct {
			Incarnations []incarnationJSON `json:"incarnations"`
			Next         string            `json:"next_page"`
		}{list, next})
	}
	if len(list) == 0 {
		fmt.Fprintln(w, "no incarnations; agents register when they reach the authority")
		return nil
	}
	t := newTable(w, "OWNER", "INCARNATION", "STATE")
	for _, one := range list {
		t.row(one.Owner, one.Incarnation, one.State)
	}
	if err := t.flush(); err != nil {
		return err
	}
	if next != "" {
		fmt.Fprintf(w, "\nthere are more: stipend incarnation list --page-size %d --page %s\n", page, next)
	}
	return nil
}

const fenceConsequences = `What fence does to incarnation %[1]v:

  * It gets no grants and no checks any more, of any tenant. This is final.
  * What it holds it may still spend until its grants expire, at most one ttl, and
    it counts as held until then: nothing is given back to any bucket.
  * Its agent, if it is alive, is not ready any more: its requests end undecided (503)
    until it is restarted. Then it is another incarnation, and gets units as before:
    to keep a gateway out for longer, stop its agent.

stipend incarnation list shows whose it is and its state.
`

func newIncarnationFence(o *output, conn *connection) *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use:   "fence INCARNATION",
		Short: "End an incarnation's grants and checks for good",
		Long: `Ends an incarnation's grants and checks for good: for one that misbehaves, or that
runs where nobody can stop it. It prints the consequences, and changes nothing
without --yes. Fencing twice is the same as once.`,
		Example: `  stipend incarnation fence 4f1c0e2ad96b4b0f8a3e5d7c9b216f08          only say what would happen
  stipend incarnation fence 4f1c0e2ad96b4b0f8a3e5d7c9b216f08 --yes`,
		Args: exactly(1, "an incarnation, as stipend incarnation list shows it"),
		RunE: func(c *cobra.Command, args []string) error {
			inc, err := grant.ParseIncarnation(args[0])
			if err != nil {
				return badInputf("%w; stipend incarnation list shows them", err)
			}
			if !yes {
				fmt.Fprintf(c.ErrOrStderr(), fenceConsequences, inc)
				return failed(fmt.Errorf("nothing was changed; add --yes to go on"))
			}
			err = conn.call(c.Context(), func(ctx context.Context, cc *grpc.ClientConn) error {
				_, err := stipendv1.NewInspectServiceClient(cc).Fence(ctx, &stipendv1.FenceRequest{Incarnation: inc[:]})
				return err
			})
			if err != nil {
				return err
			}
			if o.json() {
				return writeJSON(c.OutOrStdout(), map[string]string{"incarnation": inc.String(), "state": "fenced"})
			}
			fmt.Fprintf(c.OutOrStdout(), "incarnation %v is fenced: it gets no grants and no checks any more\n", inc)
			return nil
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "go on: the consequences are accepted")
	return c
}
