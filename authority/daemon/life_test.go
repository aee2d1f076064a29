package daemon

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// A graceful stop asks agents to leave, refuses new calls meanwhile, answers
// the parked, and ends; a new start keeps what was deducted,
// answers a retry of the same bytes with the same grant, and knows who was final.
func TestDrainAndRestart(t *testing.T) {
	cfg := testConfig(t.TempDir())
	r, err := begin(t, cfg)
	must(t, r, err)
	r.put("kept", slowPolicy())
	p := slowPolicy()
	p.Rate, p.Burst, p.Classes = grant.Rate{Units: 1, Per: time.Second}, 10, map[grant.RouteClass]grant.Class{"read": {Cost: 1}}
	r.put("parked", p)
	a := r.mustLink("gw", grant.NewIncarnation())
	if got := a.ask(a.request("kept", 1, 20, 0)); got.Result != granted {
		t.Fatalf("grant: %v", got)
	}
	if got := a.ask(a.request("parked", 1, 10, 0)); got.Result != granted || got.Units != 10 {
		t.Fatalf("grant: %v", got)
	}
	wait := a.request("parked", 2, 10, 10)
	wait.Min = 10
	wait.Sum = wait.Fingerprint()
	if got := a.ask(wait); got.Result != stipendv1.GrantResult_GRANT_RESULT_PARKED {
		t.Fatalf("with nothing left: %v", got)
	}
	gone := r.mustLink("other", grant.NewIncarnation())
	gone.discard()
	gone.until("the confirmation", func() bool { return gone.gone })
	gone.leave()

	ended := make(chan error, 1)
	go func() { ended <- r.end() }()
	a.until("the wish to drain", func() bool { return a.drain })
	// It waits for this agent: until then it says to all others that it leaves.
	_, err = r.checks.Check(ctxOf(t), &stipendv1.CheckRequest{Tenant: "kept", RouteClass: "read", Count: 1})
	wants(t, "a call while draining", err, codes.Unavailable, grant.Unavailable)
	_, err = r.link("late", grant.NewIncarnation())
	wants(t, "a stream while draining", err, codes.Unavailable, grant.Unavailable)
	h, err := healthpb.NewHealthClient(r.conn).Check(ctxOf(t), &healthpb.HealthCheckRequest{Service: services[0]})
	if err != nil || h.Status != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("health while draining: %v, %v", h, err)
	}
	if code, _ := r.get("/readyz"); code != 503 {
		t.Errorf("/readyz while draining: %d", code)
	}
	a.stream.CloseSend()
	if err := <-ended; err != nil {
		t.Fatalf("Run: %v", err)
	}

	cfg.Init = false
	r, err = begin(t, cfg)
	must(t, r, err)
	b := r.mustLink("gw", a.inc)
	if got := b.ask(b.request("kept", 1, 20, 0)); got.Result != granted || got.Units != 20 {
		t.Errorf("the same bytes after a restart: %v", got)
	}
	if state := r.tenant("kept").Ordinary; state.Level != 80 || state.Outstanding != 20 {
		t.Errorf("level %d, outstanding %d after a restart; want 80, 20", state.Level, state.Outstanding)
	}
	_, err = r.link("other", gone.inc)
	wants(t, "a discarded incarnation after a restart", err, codes.FailedPrecondition, grant.Discarded)
	b.leave()
	if err := r.end(); err != nil {
		t.Errorf("Run: %v", err)
	}
}

// An agent that stays costs the drain time, then its stream ends with a reason;
// what was parked is answered "try again" first.
func TestDrainDoesNotWaitForever(t *testing.T) {
	cfg := testConfig(t.TempDir())
	cfg.DrainTime = 100 * time.Millisecond
	r, err := begin(t, cfg)
	must(t, r, err)
	p := slowPolicy()
	p.Rate, p.Burst, p.Classes = grant.Rate{Units: 1, Per: time.Second}, 10, nil
	r.put("parked", p)
	a := r.mustLink("gw", grant.NewIncarnation())
	a.ask(a.request("parked", 1, 10, 0))
	wait := a.request("parked", 2, 10, 10)
	wait.Min = 10
	wait.Sum = wait.Fingerprint()
	if got := a.ask(wait); got.Result != stipendv1.GrantResult_GRANT_RESULT_PARKED {
		t.Fatalf("with nothing left: %v", got)
	}
	ended := make(chan error, 1)
	go func() { ended <- r.end() }()
	code, why := a.ended()
	if code != codes.Unavailable || why != grant.Unavailable.String() {
		t.Errorf("the stream ended with %v %q", code, why)
	}
	if last := a.grants[len(a.grants)-1]; last.GrantId != 2 || last.Result != stipendv1.GrantResult_GRANT_RESULT_BUSY || last.Reason != stipendv1.Reason_REASON_UNAVAILABLE {
		t.Errorf("the parked request's last answer: %v", last)
	}
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
}

// Case 25: a full queue is answered "overloaded" at once, on both paths, and
// nothing is deducted for it; another tenant's calls find room.
func TestOverloaded(t *testing.T) {
	cfg := testConfig(t.TempDir())
	cfg.Ledger.MaxInbox = 8
	r, err := begin(t, cfg)
	must(t, r, err)
	r.put("hot", slowPolicy())
	// A quiet tenant of the same partition.
	quiet := ""
	for n := 0; quiet == ""; n++ {
		if name := "quiet-" + strings.Repeat("x", n); grant.PartitionOf(grant.TenantID(name)) == grant.PartitionOf("hot") {
			quiet = name
		}
	}
	r.put(quiet, slowPolicy())
	a := r.mustLink("gw", grant.NewIncarnation())
	var batch []*stipendv1.CheckRequest
	for n := range 50 { // offered under one lock: no step comes in between
		batch = append(batch, a.checkRequest("hot", "read", uint64(n+1), time.Minute))
	}
	batch = append(batch, a.checkRequest(quiet, "read", 51, time.Minute))
	allowed, overloaded := 0, 0
	for _, c := range a.check(batch...) {
		switch {
		case c.Verdict == stipendv1.Verdict_VERDICT_ALLOW:
			allowed++
		case c.Verdict == stipendv1.Verdict_VERDICT_UNDECIDED && c.Reason == stipendv1.Reason_REASON_OVERLOADED:
			overloaded++
			if c.Sequence == 51 {
				t.Error("the quiet tenant was refused")
			}
		default:
			t.Errorf("%v", c)
		}
	}
	if allowed < 2 || overloaded < 40 || allowed+overloaded != 51 {
		t.Errorf("%d allowed, %d overloaded of 51", allowed, overloaded)
	}
	a.leave()
	if level := r.tenant("hot").Ordinary.Level; level != 100-int64(allowed-1) {
		t.Errorf("level %d after %d allowed", level, allowed-1)
	}
	wants(t, "the unary form", undecided(grant.Overloaded, 0), codes.ResourceExhausted, grant.Overloaded)
}

// With a client authority only agents with a certificate are let in.
func TestMutualTLS(t *testing.T) {
	dir := t.TempDir()
	pool, pair := certificate(t, dir)
	cfg := testConfig(filepath.Join(dir, "data"))
	cfg.TLS = TLS{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), ClientCA: filepath.Join(dir, "cert.pem")}
	with := &tls.Config{RootCAs: pool, ServerName: "localhost", Certificates: []tls.Certificate{pair}}
	r, err := begin(t, cfg, grpc.WithTransportCredentials(credentials.NewTLS(with)))
	must(t, r, err)
	r.put("tls", slowPolicy())
	without := &tls.Config{RootCAs: pool, ServerName: "localhost"}
	conn, err := grpc.NewClient("passthrough:///"+r.at.GRPC.String(), grpc.WithTransportCredentials(credentials.NewTLS(without)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = stipendv1.NewPolicyServiceClient(conn).GetPolicy(ctxOf(t), &stipendv1.GetPolicyRequest{Tenant: "tls"})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("without a certificate: %v", err)
	}
}

// certificate writes a self-signed pair that is its own authority.
func certificate(t *testing.T, dir string) (*x509.CertPool, tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	form := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, form, form, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "cert.pem"), certPEM, 0o600), os.WriteFile(filepath.Join(dir, "key.pem"), keyPEM, 0o600)); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(certPEM)
	return pool, pair
}

// Every faulty field is named with what was given and what is allowed.
func TestConfig(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Listen, cfg.GCPercent, cfg.Ledger.MaxInbox, cfg.Etcd.Prefix, cfg.Store.CacheBytes, cfg.TLS.ClientCA = "0.0.0.0:1", 1, 0, "x", 5, "ca.pem"
	err := cfg.Validate()
	for _, want := range []string{
		`listen: "0.0.0.0:1" without tls; allowed: a loopback address`, `data: ""; allowed: the path`, "gc_percent: 1; allowed: 10 to 2000",
		"ledger.max_inbox: 0; allowed: 1 to 1048576", `etcd.prefix: "x"; allowed: `, "store.cache_bytes: 5; allowed: ", `tls.client_ca: "ca.pem"; allowed: only with`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\ndoes not say %s", err, want)
		}
	}
	cfg = DefaultConfig()
	cfg.Data = "d"
	if err := cfg.Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
}
