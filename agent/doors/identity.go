package doors

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"github.com/stipend/stipend/proto/grant"
)

// IdentityConfig says whose word counts for who a request is.
type IdentityConfig struct {
	// KeyFile maps hashes of API keys to tenants. Keys are presented as
	// "Authorization: Bearer KEY" or "X-API-Key: KEY".
	KeyFile string `yaml:"key_file" help:"file of key hashes: lines of sha256:HEX TENANT"`
	// TenantHeader names a header that carries the tenant, from TrustedPeers only.
	TenantHeader string `yaml:"tenant_header" help:"header that names the tenant, from trusted peers only"`
	// TrustedPeers are CIDRs of the direct peers (never of X-Forwarded-For)
	// whose TenantHeader and count headers count.
	TrustedPeers []string `yaml:"trusted_peers" help:"CIDRs of direct peers whose tenant and count headers count"`
}

// Validate names every field that cannot be used. It reads no file.
func (c IdentityConfig) Validate() error {
	var errs []error
	if c.KeyFile == "" && c.TenantHeader == "" {
		errs = append(errs, errors.New(`key_file: ""; allowed: a file of key hashes, or tenant_header with trusted_peers`))
	}
	if c.TenantHeader != "" && len(c.TrustedPeers) == 0 {
		errs = append(errs, fmt.Errorf("trusted_peers: none; allowed: the CIDRs whose %s is believed", c.TenantHeader))
	}
	if c.TenantHeader != "" && !validHeader(c.TenantHeader) {
		errs = append(errs, fmt.Errorf("tenant_header: %q; allowed: letters, digits and '-'", c.TenantHeader))
	}
	if _, err := prefixes(c.TrustedPeers); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func prefixes(list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	var errs []error
	for i, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			errs = append(errs, fmt.Errorf("trusted_peers.%d: %q; allowed: a CIDR such as 10.0.0.0/8 or 127.0.0.1/32", i, s))
			continue
		}
		out = append(out, p.Masked())
	}
	return out, errors.Join(errs...)
}

func validHeader(s string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' {
			return false
		}
	}
	return s != ""
}

// Identity verifies credentials.
type Identity struct {
	keys    *Keys
	header  string
	trusted []netip.Prefix
}

// NewIdentity reads the key file.
func NewIdentity(c IdentityConfig) (*Identity, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	id := &Identity{header: http.CanonicalHeaderKey(c.TenantHeader)}
	id.trusted, _ = prefixes(c.TrustedPeers)
	if c.KeyFile != "" {
		var err error
		if id.keys, err = OpenKeys(c.KeyFile); err != nil {
			return nil, err
		}
	}
	return id, nil
}

// Keys is the key file in use, or nil.
func (id *Identity) Keys() *Keys { return id.keys }

// trusts reports whether the direct peer is one of the trusted.
func (id *Identity) trusts(remote string) bool {
	if len(id.trusted) == 0 {
		return false
	}
	ap, err := netip.ParseAddrPort(remote)
	if err != nil {
		return false
	}
	addr := ap.Addr().Unmap().WithZone("")
	for _, p := range id.trusted {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// tenant says who sent the request; ok is false when nothing verifies it. Two
// credentials of different tenants verify nobody.
func (id *Identity) tenant(h http.Header, remote string) (t grant.TenantID, ok bool) {
	if id.header != "" {
		if v := h[id.header]; len(v) > 0 && id.trusts(remote) {
			t = grant.TenantID(v[0])
			return t, len(v) == 1 && t.Validate() == nil
		}
	}
	if id.keys == nil {
		return "", false
	}
	present := func(key string) bool {
		found, known := id.keys.tenant(key)
		if !known || t != "" && t != found {
			return false
		}
		t = found
		return true
	}
	for _, v := range h["Authorization"] {
		scheme, key, _ := strings.Cut(v, " ")
		if strings.EqualFold(scheme, "Bearer") && !present(strings.TrimSpace(key)) {
			return "", false
		}
	}
	for _, v := range h["X-Api-Key"] {
		if !present(v) {
			return "", false
		}
	}
	return t, t != ""
}
