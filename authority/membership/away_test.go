package membership

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stipend/stipend/authority"
)

// relay stands between a Registry and etcd, and can be cut.
type relay struct {
	t     *testing.T
	addr  string
	serve sync.WaitGroup

	mu    sync.Mutex
	l     net.Listener
	conns []net.Conn
}

func newRelay(t *testing.T) *relay {
	r := &relay{t: t, addr: "127.0.0.1:0"}
	r.mend()
	t.Cleanup(func() { r.cut() })
	return r
}

func (r *relay) mend() {
	l, err := net.Listen("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.addr, r.l = l.Addr().String(), l
	r.mu.Unlock()
	r.serve.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", strings.TrimPrefix(shared, "unix://"))
			if err != nil {
				in.Close()
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, in, out)
			closed := r.l != l
			r.mu.Unlock()
			if closed {
				in.Close()
				out.Close()
				return
			}
			for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
				r.serve.Go(func() {
					io.Copy(pair[0], pair[1])
					pair[0].Close()
				})
			}
		}
	})
}

func (r *relay) cut() {
	r.mu.Lock()
	if r.l != nil {
		r.l.Close()
	}
	r.l = nil
	for _, c := range r.conns {
		c.Close()
	}
	r.conns = nil
	r.mu.Unlock()
	r.serve.Wait()
}

// While etcd is away a live incarnation whose stream broke opens another one;
// a newcomer, and another name, do not. It is registered when etcd is back.
func TestEtcdAway(t *testing.T) {
	way := newRelay(t)
	cfg := testConfig(t)
	cfg.Endpoints = []string{way.addr}
	w, direct := start(t, cfg), start(t, testConfig(t))
	w.register("gw", inc(1)).Close() // the stream broke
	way.cut()

	ctx, cancel := context.WithTimeout(t.Context(), 4*renewPatience)
	defer cancel()
	again, err := w.Register(ctx, "gw", inc(1))
	if err != nil {
		t.Fatalf("a live incarnation opens again: %v", err)
	}
	for name, i := range map[string]byte{"new-gw": 2, "other-name": 1} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*renewPatience)
		if s, err := w.Register(ctx, "other-name", inc(i)); err == nil {
			s.Close()
			t.Errorf("%s was registered without etcd", name)
		}
		cancel()
	}

	direct.await(inc(1), authority.Lost) // its first lease ran out
	direct.mu.Lock()
	direct.changes = nil
	direct.mu.Unlock()
	way.mend()
	direct.await(inc(1), authority.Live)
	again.Close()
}
