package membership

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"
)

// Config says where etcd is and how much of it may be used.
type Config struct {
	// Dir is the folder of the embedded server's data, created if missing with
	// mode 0700. Exactly one of Dir and Endpoints is set.
	Dir string `yaml:"-"`
	// Endpoints of an external etcd: URLs, or host:port.
	Endpoints []string `yaml:"endpoints" help:"external etcd instead of the embedded one: URLs"`
	// CertFile and KeyFile are this client's certificate, CAFile the authority
	// that signed the servers'; PEM. Only with Endpoints.
	CertFile string `yaml:"cert_file" help:"client certificate for the external etcd (PEM)"`
	KeyFile  string `yaml:"key_file" help:"its key (PEM)"`
	CAFile   string `yaml:"ca_file" help:"who signed the external etcd's certificates (PEM)"`
	// Username and PasswordFile log in to an external etcd that asks for it.
	Username     string `yaml:"username" help:"user name at the external etcd"`
	PasswordFile string `yaml:"password_file" help:"file with that user's password"`
	// Prefix of all keys, so that several installations share one etcd.
	Prefix string `yaml:"prefix" help:"of all keys in etcd"`
	// LeaseTTL is how long after its stream broke an incarnation is taken for
	// lost: 2 s to 1 h in whole seconds. etcd may grant more.
	LeaseTTL time.Duration `yaml:"lease_ttl" help:"after this long without a stream an agent counts as lost"`
	// MaxIncarnations bounds the incarnations remembered, final and lost ones
	// included: 1 to 1,000,000. When it is reached the oldest of those that
	// have no lease is forgotten; when all have one, newcomers are refused.
	MaxIncarnations int `yaml:"max_incarnations"`
	// Retention is how long an incarnation without a lease is remembered, by
	// this process's own clock from the moment it learned of the loss: 1 min to
	// 720 h. It must exceed the life of any grant.
	Retention time.Duration `yaml:"retention"`
	// QuotaBytes bounds the embedded server's database: 16 MiB to 8 GiB.
	QuotaBytes int64 `yaml:"quota_bytes" conf:"bytes"`

	Logger *slog.Logger `yaml:"-"` // nil: slog.Default()
}

// DefaultConfig is an embedded etcd without its folder, which the caller sets.
func DefaultConfig() Config {
	return Config{
		Prefix:          "/stipend/",
		LeaseTTL:        5 * time.Second,
		MaxIncarnations: 16384,
		Retention:       24 * time.Hour,
		QuotaBytes:      512 << 20,
	}
}

// Validate names every field out of range. That neither Dir nor Endpoints is set
// is for Open to refuse: Dir is not configuration, and set by the caller.
func (c Config) Validate() error {
	var errs []error
	bad := func(field string, given any, allowed string) {
		errs = append(errs, fmt.Errorf("%s: %v; allowed: %s", field, given, allowed))
	}
	if c.Dir != "" && len(c.Endpoints) > 0 {
		bad("endpoints", c.Endpoints, "none together with a data folder for the embedded etcd")
	}
	for i, e := range c.Endpoints {
		if e == "" || strings.ContainsAny(e, " \t\n") {
			bad(fmt.Sprintf("endpoints[%d]", i), fmt.Sprintf("%q", e), "a URL or host:port")
		}
	}
	if len(c.Endpoints) == 0 {
		for field, v := range map[string]string{"cert_file": c.CertFile, "key_file": c.KeyFile, "ca_file": c.CAFile, "username": c.Username, "password_file": c.PasswordFile} {
			if v != "" {
				bad(field, v, "only with endpoints of an external etcd")
			}
		}
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		bad("cert_file", fmt.Sprintf("%q with key_file %q", c.CertFile, c.KeyFile), "both or neither")
	}
	if (c.Username == "") != (c.PasswordFile == "") {
		bad("username", fmt.Sprintf("%q with password_file %q", c.Username, c.PasswordFile), "both or neither")
	}
	if c.Prefix == "" || !strings.HasSuffix(c.Prefix, "/") || len(c.Prefix) > 256 {
		bad("prefix", fmt.Sprintf("%q", c.Prefix), "1 to 256 bytes that end in /")
	}
	if c.LeaseTTL < 2*time.Second || c.LeaseTTL > time.Hour || c.LeaseTTL%time.Second != 0 {
		bad("lease_ttl", c.LeaseTTL, "2s to 1h in whole seconds")
	}
	if c.MaxIncarnations < 1 || c.MaxIncarnations > 1_000_000 {
		bad("max_incarnations", c.MaxIncarnations, "1 to 1000000")
	}
	if c.Retention < time.Minute || c.Retention > 720*time.Hour {
		bad("retention", c.Retention, "1m to 720h")
	}
	if c.QuotaBytes < 16<<20 || c.QuotaBytes > 8<<30 {
		bad("quota_bytes", c.QuotaBytes, "16777216 (16 MiB) to 8589934592 (8 GiB)")
	}
	return errors.Join(errs...)
}

// tlsConfig is nil when the endpoints decide by their scheme alone.
func (c Config) tlsConfig() (*tls.Config, error) {
	secure := c.CertFile != "" || c.CAFile != ""
	for _, e := range c.Endpoints {
		secure = secure || strings.HasPrefix(e, "https://")
	}
	if !secure {
		return nil, nil
	}
	out := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CertFile != "" {
		// Read at each handshake: certificates are rotated under running processes.
		cert, key := c.CertFile, c.KeyFile
		if _, err := tls.LoadX509KeyPair(cert, key); err != nil {
			return nil, fmt.Errorf("cert_file %s, key_file %s: %w", cert, key, err)
		}
		out.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(cert, key)
			return &pair, err
		}
	}
	if c.CAFile != "" {
		pem, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		out.RootCAs = x509.NewCertPool()
		if !out.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca_file: %s holds no certificate in PEM form", c.CAFile)
		}
	}
	return out, nil
}
