package doors_test

import (
	"context"
	"log"
	"net/http"

	"github.com/stipend/stipend/agent"
	"github.com/stipend/stipend/agent/doors"
	"github.com/stipend/stipend/agent/gate"
)

// A Go gateway that decides by itself: the tenant comes from a credential that
// the gateway verified.
func Example_library() {
	cfg := gate.Defaults()
	cfg.Owner = "gw-1"
	cfg.Authority.Target = "authority:7400"
	g, err := gate.New(cfg)
	if err != nil {
		log.Fatal(err)
	}
	go g.Run(context.Background())

	handle := func(w http.ResponseWriter, r *http.Request) {
		d := g.Decide(r.Context(), gate.Request{Tenant: "acme", Class: "read", Count: 1})
		switch {
		case d.Outcome == agent.Admitted && g.Recheck(d):
			w.Write([]byte("forwarded exactly once"))
		case d.Outcome == agent.Denied:
			w.WriteHeader(http.StatusTooManyRequests)
		default:
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}
	http.Handle("/", http.HandlerFunc(handle))
}

// The same with credentials, routes and answers by the door.
func Example_middleware() {
	cfg := gate.Defaults()
	cfg.Owner = "gw-1"
	g, err := gate.New(cfg)
	if err != nil {
		log.Fatal(err)
	}
	go g.Run(context.Background())
	id, err := doors.NewIdentity(doors.IdentityConfig{KeyFile: "keys"})
	if err != nil {
		log.Fatal(err)
	}
	routes, err := doors.NewRoutes([]doors.Route{{Pattern: "GET /v1/items/{id}", Class: "read"}})
	if err != nil {
		log.Fatal(err)
	}
	next := http.NotFoundHandler() // what the gateway serves
	http.Handle("/", doors.New(g, id, routes).Middleware(next))
}
