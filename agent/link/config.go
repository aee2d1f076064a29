package link

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// TLS says how the stream is protected. The zero value is plain text, for an
// authority on the same host or behind a mesh.
type TLS struct {
	Enabled bool `yaml:"enabled" help:"protect the stream to the authority with TLS"`
	// CA is a PEM file of roots; empty: those of the system.
	CA string `yaml:"ca" help:"roots of the authority's certificate (PEM); empty: the system's"`
	// Cert and Key are this agent's PEM files for mutual TLS; both or none.
	Cert string `yaml:"cert" help:"certificate of this agent (PEM)"`
	Key  string `yaml:"key" help:"its key (PEM)"`
	// ServerName overrides the name that the certificate must bear.
	ServerName string `yaml:"server_name"`
}

// client builds the configuration; nil without TLS. The key pair is read again
// for each handshake, so that a rotated certificate needs no restart.
func (t TLS) client() (*tls.Config, error) {
	if !t.Enabled {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("link: tls.ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("link: tls.ca: %s holds no PEM certificate", t.CA)
		}
	}
	if t.Cert != "" {
		if _, err := tls.LoadX509KeyPair(t.Cert, t.Key); err != nil {
			return nil, fmt.Errorf("link: tls.cert: %w", err)
		}
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
			return &pair, err
		}
	}
	return c, nil
}

// Config is where the authority is and how patient the link is.
type Config struct {
	// Target is the authority: host:port. A name is resolved again for each dial.
	Target string `yaml:"target" help:"the authority: host:port"`
	TLS    TLS    `yaml:"tls"`
	// Silence: a stream on which something was sent and nothing was heard for
	// this long is lost. 100ms to 1m.
	Silence time.Duration `yaml:"silence"`
	// Handshake bounds the time from the dial to the authority's welcome.
	Handshake time.Duration `yaml:"handshake"`
	// RedialMin and RedialMax bound the mean pause before a redial; each pause
	// is drawn from zero to twice the mean (full jitter).
	RedialMin time.Duration `yaml:"redial_min"`
	RedialMax time.Duration `yaml:"redial_max"`
	// Keepalive is the pause after which an idle connection is probed; at
	// least 10s, zero: never.
	Keepalive time.Duration `yaml:"keepalive"`
	// Queue bounds the grant requests, and as many Checks, that wait for sending.
	Queue int `yaml:"queue"`

	// Dial replaces the network, for tests and unusual transports. Target is
	// then a name of its own choosing.
	Dial func(ctx context.Context, addr string) (net.Conn, error) `yaml:"-"`
}

// Defaults are sound for an authority within 100 ms.
func Defaults() Config {
	return Config{
		Target:    "127.0.0.1:7400",
		Silence:   2 * time.Second,
		Handshake: 2 * time.Second,
		RedialMin: 50 * time.Millisecond,
		RedialMax: 400 * time.Millisecond,
		Keepalive: 10 * time.Second,
		Queue:     16384,
	}
}

// Validate names every field that cannot be used, in its YAML form.
func (c Config) Validate() error {
	var errs []error
	bad := func(ok bool, field string, given any, allowed string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %v; allowed: %s", field, given, allowed))
		}
	}
	bad(c.Target != "" && (c.Dial != nil || hostPort(c.Target)), "target", strconv.Quote(c.Target), "host:port of the authority, such as authority:7400 or 127.0.0.1:7400")
	bad(c.Silence >= 100*time.Millisecond && c.Silence <= time.Minute, "silence", c.Silence, "100ms to 1m")
	bad(c.Handshake >= 10*time.Millisecond && c.Handshake <= time.Minute, "handshake", c.Handshake, "10ms to 1m")
	bad(c.RedialMin >= time.Millisecond, "redial_min", c.RedialMin, "at least 1ms")
	bad(c.RedialMax >= c.RedialMin && c.RedialMax <= time.Minute, "redial_max", c.RedialMax, "redial_min to 1m")
	bad(c.Keepalive == 0 || c.Keepalive >= 10*time.Second, "keepalive", c.Keepalive, "0 (never), or at least 10s")
	bad(c.Queue >= 1 && c.Queue <= 1<<20, "queue", c.Queue, "1 to 1048576 entries")
	bad((c.TLS.Cert == "") == (c.TLS.Key == ""), "tls.cert", c.TLS.Cert, "both tls.cert and tls.key, or neither")
	bad(c.TLS.Enabled || c.TLS == (TLS{}), "tls.enabled", c.TLS.Enabled, "true when another tls field is set")
	return errors.Join(errs...)
}

// hostPort reports whether s is a host, or an address, and a port's number.
func hostPort(s string) bool {
	host, port, err := net.SplitHostPort(s)
	n, bad := strconv.ParseUint(port, 10, 16)
	return err == nil && bad == nil && n > 0 && host != "" && !strings.ContainsAny(host, "/ ")
}
