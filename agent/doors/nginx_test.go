package doors

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// nginxDocumented is the configuration in the documentation.
func nginxDocumented(t *testing.T) string {
	doc, err := os.ReadFile("../../docs/gateways.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "```nginx\n")
	block, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatal("docs/gateways.md has no configuration for nginx")
	}
	return block
}

// startNginx runs the documented configuration in front of the backend, on a
// socket in a folder of its own, and returns a client that connects to it.
func startNginx(t *testing.T, auth, backend string) *http.Client {
	program, err := exec.LookPath("nginx")
	if err != nil {
		if program, err = exec.LookPath("/usr/sbin/nginx"); err != nil {
			t.Skip("nginx is not installed")
		}
	}
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	site := nginxDocumented(t)
	for from, to := range map[string]string{
		"listen 127.0.0.1:8080;": "listen unix:" + socket + ";", "http://127.0.0.1:8081": auth, "http://127.0.0.1:9000": backend,
	} {
		if strings.Count(site, from) != 1 {
			t.Fatalf("%q is not once in\n%s", from, site)
		}
		site = strings.Replace(site, from, to, 1)
	}
	var temp strings.Builder
	for _, of := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		fmt.Fprintf(&temp, "%s_temp_path %s/%s;\n", of, dir, of)
	}
	conf := filepath.Join(dir, "nginx.conf")
	whole := fmt.Sprintf("daemon off;\nmaster_process off;\npid %s/pid;\nerror_log stderr;\nevents {}\nhttp {\naccess_log off;\n%s%s}\n", dir, &temp, site)
	if err := os.WriteFile(conf, []byte(whole), 0o600); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd := exec.Command(program, "-p", dir, "-c", conf, "-e", "stderr")
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var once sync.Once
	stop := func() {
		once.Do(func() {
			cmd.Process.Signal(syscall.SIGTERM)
			<-ended
		})
	}
	t.Cleanup(stop)
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	for until := time.Now().Add(10 * time.Second); ; {
		c, err := dial(context.Background(), "", "")
		if err == nil {
			c.Close()
			break
		}
		select {
		case err := <-ended:
			once.Do(func() {})
			t.Fatalf("nginx ended: %v\n%s", err, &said)
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(until) {
			stop()
			t.Fatalf("nginx does not listen\n%s", &said)
		}
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	t.Cleanup(client.CloseIdleConnections)
	return client
}

// The documented nginx forwards what is admitted, whole and once; no header of
// a client changes what it is taken for; and what is refused is, as documented,
// 500 without Retry-After, but for 401 and 403.
func TestNginx(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	backend := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, r.Method+" "+r.RequestURI+" "+string(b))
	}))
	defer backend.Close()
	r := newRig(t, nil)
	r.a.Put("acme", fixed(2))
	r.await(t)
	h, err := r.d.ForwardAuth(XOriginal, "/auth")
	if err != nil {
		t.Fatal(err)
	}
	var asked []string
	auth := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		asked = append(asked, req.URL.Path)
		mu.Unlock()
		h.ServeHTTP(w, req)
	}))
	defer auth.Close()
	client := startNginx(t, auth.URL, backend.URL)
	for _, c := range []struct {
		what, method, path, key, body string
		forged                        []string
		want                          int
	}{
		{"no key", "GET", "/v1/a", "", "", nil, 401},
		{"tenant without a policy", "GET", "/v1/a", "k9", "", nil, 403},
		{"the endpoint is not the client's to ask", "GET", "/stipend", "k1", "", nil, 404},
		{"no route: 404", "GET", "/nowhere", "k1", "", nil, 500},
		{"a dear path under a cheap name", "GET", "/nowhere", "k1", "", []string{"X-Original-URI", "/v1/a", "X-Forwarded-Uri", "/v1/a", "X-Forwarded-Method", "GET"}, 500},
		{"a dear method under a cheap name", "DELETE", "/v1/a", "k1", "", []string{"X-Original-Method", "GET", "X-Forwarded-Method", "GET"}, 500},
		{"admitted", "GET", "/v1/a?q=1", "k1", "", nil, 200},
		{"admitted with a body", "POST", "/v1/b", "k1", "hello", []string{"X-Original-Method", "DELETE"}, 200},
		{"over the rate: 429", "GET", "/v1/a", "k1", "", nil, 500},
	} {
		req, err := http.NewRequest(c.method, "http://api.example.com"+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(c.forged); i += 2 {
			req.Header.Set(c.forged[i], c.forged[i+1])
		}
		if c.key != "" {
			req.Header.Set("X-API-Key", c.key)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want || resp.Header.Get("Retry-After") != "" {
			t.Errorf("%s: %d %v; want %d", c.what, resp.StatusCode, resp.Header, c.want)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if got := strings.Join(seen, "|"); got != "GET /v1/a?q=1 |POST /v1/b hello" {
		t.Errorf("the backend saw %q", got)
	}
	for _, path := range asked {
		if path != "/auth" {
			t.Errorf("nginx asked %s", path)
		}
	}
}
