package demo

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Answers counts what the load of one role got.
type Answers struct {
	Role       string `json:"role"`
	Sent       int64  `json:"sent"`
	OK         int64  `json:"ok"`
	Limited    int64  `json:"limited_429"`
	Undecided  int64  `json:"undecided_503"`
	Unverified int64  `json:"unverified_401"`
	Unrouted   int64  `json:"unrouted_404"`
	Other      int64  `json:"other"`
	Broken     int64  `json:"broken_connections"`
	Skipped    int64  `json:"not_sent"` // too many were in flight
}

// Latency of the decisions on one path.
type Latency struct {
	Path string        `json:"path"`
	N    int64         `json:"decisions"`
	P50  time.Duration `json:"p50_ns"` // at most
	P99  time.Duration `json:"p99_ns"` // at most
}

// Units says where the first tenant's units went besides being spent.
type Units struct {
	Granted     grant.Units `json:"granted"`
	Outstanding grant.Units `json:"outstanding"` // at the end of the load
	Expired     grant.Units `json:"expired"`
	DiedWith    grant.Units `json:"died_with_agent"` // at most
	Died        string      `json:"died_agent"`      // empty: nobody
}

// Result is what a run showed.
type Result struct {
	Held    bool          `json:"held"` // the bound, at the backend and by the agents' records
	Kept    bool          `json:"kept"` // the utilisation promise
	Length  time.Duration `json:"length_ns"`
	Backend []Excess      `json:"at_backend"` // by tenant, worst first
	Agents  []Excess      `json:"by_agents"`
	Missing uint64        `json:"agent_records_lost"`
	Torn    int           `json:"agent_records_torn"`
	Strange string        `json:"strange,omitempty"` // a request that must not have reached the backend
	Use     Use           `json:"utilisation"`
	Units   Units         `json:"units"`
	// Per 1,000 admitted requests of all tenants.
	Messages      float64       `json:"messages_per_1000"`
	GrantRequests float64       `json:"grant_requests_per_1000"`
	Checks        float64       `json:"checks_per_1000"`
	Admitted      uint64        `json:"admitted_requests"`
	Latency       []Latency     `json:"decision_latency"`
	Answers       []Answers     `json:"answers"`
	Forward       time.Duration `json:"forward_delay_ns"` // d
	Slowest       time.Duration `json:"slowest_ns"`       // from the load to the backend, of the admitted
	Notes         []string      `json:"notes"`
	Dir           string        `json:"dir"`
	ByHand        []string      `json:"by_hand"`
}

// explainMessages notes why there may be more messages than admitted requests.
func (r *Result) explainMessages() {
	if r.Messages > 1000 {
		r.Notes = append(r.Notes, "more messages than admitted requests: tenants this slow gain nothing from grants. Cold ones are checked request by request, a grant holds few of their requests, and refused requests ask too")
	}
}

// OK reports whether the demo has shown what it is for.
func (r *Result) OK() bool { return r.Held && r.Kept && r.Strange == "" }

// Write tells a person.
func (r *Result) Write(w io.Writer) error {
	broken, tenants := map[string]bool{}, map[string]bool{}
	for _, list := range [][]Excess{r.Backend, r.Agents} {
		for _, e := range list {
			tenants[e.Tenant] = true
			if !e.Held {
				broken[e.Tenant] = true
			}
		}
	}
	if len(broken) > 0 {
		fmt.Fprintf(w, "\nBOUND BROKEN for %d of %s\n", len(broken), plural(len(tenants), "tenant"))
	} else {
		fmt.Fprintf(w, "\nBOUND HELD for %s, over every interval of any length\n", plural(len(tenants), "tenant"))
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  RECORDED BY\tREQUESTS\tWORST TENANT\tEXCESS OVER r*T\tB + N*q\tWITHIN\tALLOWED\tBOUND")
	r.worstLine(t, "the backend, at forwarding", r.Backend)
	r.worstLine(t, "the agents, at the decision", r.Agents)
	if err := t.Flush(); err != nil {
		return err
	}
	for _, list := range [][]Excess{r.Backend, r.Agents} {
		if len(list) > 0 && !list[0].Held {
			fmt.Fprintf(w, "  Tenant %q was admitted %d units in its worst interval, where %d are allowed.\n", list[0].Tenant, list[0].WorstAdmitted, list[0].WorstAllowed)
		}
	}
	fmt.Fprintln(w, "  ALLOWED adds what the rate brings between a decision and its record (column WITHIN).")
	if r.Strange != "" {
		fmt.Fprintf(w, "  A request reached the backend that must not: %s\n", r.Strange)
	}
	r.writeUse(w)
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\n  calls to the authority\t%.0f messages with %.0f grant requests and %.0f checks per 1,000 admitted requests\n", r.Messages, r.GrantRequests, r.Checks)
	fmt.Fprintf(t, "  units of %s\t%d granted, %d outstanding at the end, %d expired\n", r.Use.Tenant, r.Units.Granted, r.Units.Outstanding, r.Units.Expired)
	if r.Units.Died != "" {
		fmt.Fprintf(t, "\tat most %d died with %s\n", r.Units.DiedWith, r.Units.Died)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(r.Latency) > 0 {
		t = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "\n  DECISIONS TOOK\tP50\tP99")
		for _, l := range r.Latency {
			fmt.Fprintf(t, "  %s\t<= %v\t<= %v\n", l.Path, l.P50, l.P99)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	if err := r.writeAnswers(w); err != nil {
		return err
	}
	for _, s := range r.Notes {
		fmt.Fprintf(w, "  note: %s\n", s)
	}
	if len(r.ByHand) > 0 {
		fmt.Fprintf(w, "\nBY HAND\n  %s\n", strings.Join(r.ByHand, "\n  "))
	}
	return nil
}

func heldWord(held bool) string {
	if held {
		return "HELD"
	}
	return "BROKEN"
}

func (r *Result) worstLine(w io.Writer, by string, list []Excess) {
	var n uint64
	for _, e := range list {
		n += e.Requests
	}
	if len(list) == 0 {
		fmt.Fprintf(w, "  %s\t0\t-\t-\t-\t-\t-\t%s\n", by, heldWord(true))
		return
	}
	e := list[0]
	for _, one := range list { // the hot one speaks for all, unless another is broken
		if e.Held && one.Role == hot.String() {
			e = one
		}
	}
	fmt.Fprintf(w, "  %s\t%d\t%s\t%d\t%d\t%v\t%d\t%s\n", by, n, e.Tenant, e.Most, e.Slack, e.Within.Round(time.Millisecond), e.Allowed, heldWord(e.Held))
}

func (r *Result) writeUse(w io.Writer) {
	u := r.Use
	if !u.Judged {
		fmt.Fprintf(w, "\nUTILISATION %s\n", u.What)
		return
	}
	word := "KEPT"
	if !u.Kept {
		word = "MISSED"
	}
	fmt.Fprintf(w, "\nUTILISATION %s: %d.%02d %% (97 %% is promised)\n  %d units admitted of %d, %s\n",
		word, u.PPM/10_000, u.PPM%10_000/100, u.Admitted, u.Of, u.What)
}

func (r *Result) writeAnswers(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\n  TENANTS\tSENT\tADMITTED\t429\t503\t401\t404\tCONNECTION LOST")
	for _, a := range r.Answers {
		fmt.Fprintf(t, "  %s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", a.Role, a.Sent, a.OK, a.Limited, a.Undecided, a.Unverified, a.Unrouted, a.Broken)
	}
	return t.Flush()
}
