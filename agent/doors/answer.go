package doors

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/proto/grant"
)

// ShadowHeader tells, on admitted requests, what a policy in mode shadow would
// have refused them for.
const ShadowHeader = "Stipend-Shadow"

// Problem is the body of every refusal (application/problem+json).
type Problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Reason string `json:"reason"`           // stable word, for programs
	Policy string `json:"policy,omitempty"` // the plan in force
	Limit  string `json:"limit,omitempty"`  // its rate and burst

	retryAfter time.Duration // zero: no header
}

func (p Problem) write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	if p.retryAfter > 0 {
		h.Set("Retry-After", strconv.FormatInt(seconds(p.retryAfter), 10))
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	body, err := json.Marshal(p)
	if err != nil { // cannot be: a struct of strings
		panic(err)
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(p.Status)
	w.Write(body)
}

// seconds rounds up to whole seconds, at least one.
func seconds(d time.Duration) int64 {
	s := int64(d / time.Second)
	if d%time.Second > 0 {
		s++
	}
	return max(s, 1)
}

func plain(status int, reason, detail string) Problem {
	return Problem{Type: "urn:stipend:problem:" + reason, Title: http.StatusText(status), Status: status, Detail: detail, Reason: reason}
}

var details = map[grant.Reason]string{
	grant.Over:             "The tenant is over its rate.",
	grant.CostExceedsBurst: "The request costs more than the tenant's burst: it can never be admitted as it is.",
	grant.Overloaded:       "Too many requests wait for a decision.",
	grant.Unavailable:      "The rate limiter cannot decide now.",
	grant.Deadline:         "The rate limiter did not decide in time.",
	grant.ClockDistrust:    "A clock of this gateway moved; what it held was dropped.",
	grant.UnknownTenant:    "The tenant has no policy.",
	grant.UnknownRoute:     "The tenant's policy does not know this kind of request.",
	grant.Invalid:          "The request cannot be judged: a field is out of range.",
}

// refusal is the answer to a decision that does not admit.
func refusal(d agent.Decision) Problem {
	status := http.StatusServiceUnavailable
	retry := d.RetryAfter
	switch d.Outcome {
	case agent.Denied:
		status = http.StatusTooManyRequests
		if d.Reason == grant.CostExceedsBurst {
			retry = 0
		}
	case agent.Rejected:
		status, retry = http.StatusForbidden, 0
		switch d.Reason {
		case grant.UnknownRoute:
			status = http.StatusNotFound
		case grant.Invalid:
			status = http.StatusBadRequest
		}
	default: // undecided, and whatever else is not an admission
		retry = max(retry, time.Second)
	}
	reason := d.Reason.String()
	if d.Reason == grant.None {
		reason = grant.Unavailable.String()
	}
	p := plain(status, reason, details[d.Reason])
	p.retryAfter = retry
	if d.Policy != nil {
		p.Policy = d.Policy.Plan
		p.Limit = fmt.Sprintf("%v, burst %d", d.Policy.Rate, d.Policy.Burst)
	}
	return p
}
