package doors

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

const (
	maxKeyFile   = 256 << 20 // bytes
	maxKeyLen    = 4096      // bytes of a presented key
	maxKeyErrors = 20        // reported at once
	keysEvery    = time.Second
)

type keyring map[[sha256.Size]byte]grant.TenantID

// parseKeys reads lines of "sha256:<64 hexadecimal digits> <tenant>"; empty
// lines and lines that begin with # are skipped. Many keys may map to one
// tenant. The last line must end: a file cut in the middle of a tenant's name
// would otherwise move its key to another tenant. Every error is
// name:line: what is wrong.
func parseKeys(name string, data []byte) (keyring, error) {
	var errs []error
	bad := func(line int, format string, a ...any) {
		if len(errs) < maxKeyErrors {
			errs = append(errs, fmt.Errorf("%s:%d: %s", name, line, fmt.Sprintf(format, a...)))
		}
	}
	keys, at := keyring{}, map[[sha256.Size]byte]int{}
	n := 0
	for len(data) > 0 {
		n++
		raw, rest, ended := bytes.Cut(data, []byte("\n"))
		data = rest
		line := strings.TrimSpace(string(raw))
		if !ended && line != "" && line[0] != '#' {
			bad(n, "the line does not end; is the file half-written?")
			continue
		}
		if line == "" || line[0] == '#' {
			continue
		}
		digest, tenant, _ := strings.Cut(strings.ReplaceAll(line, "\t", " "), " ")
		tenant = strings.TrimSpace(tenant)
		hexed, ok := strings.CutPrefix(digest, "sha256:")
		var key [sha256.Size]byte
		if ok && len(hexed) == 2*len(key) {
			_, err := hex.Decode(key[:], []byte(hexed))
			ok = err == nil
		} else {
			ok = false
		}
		if !ok {
			bad(n, "the key is not sha256: and 64 hexadecimal digits; write the hash of the key, never the key")
			continue
		}
		if err := grant.TenantID(tenant).Validate(); err != nil {
			bad(n, "%v", err)
			continue
		}
		if before := at[key]; before != 0 {
			bad(n, "the key is on line %d already", before)
			continue
		}
		at[key], keys[key] = n, grant.TenantID(tenant)
	}
	if len(keys) == 0 && len(errs) == 0 {
		bad(max(n, 1), "the file holds no key")
	}
	return keys, errors.Join(errs...)
}

// Keys maps API keys to tenants, from a file of hashes that may change while
// it is used. A faulty file changes nothing: the keys of before stay.
type Keys struct {
	path string
	cur  atomic.Pointer[keyring]

	mu     sync.Mutex
	seen   os.FileInfo // of the last content that was read
	err    error       // why the last reading failed
	loaded time.Time
}

// KeysState is for metrics and people.
type KeysState struct {
	Keys   int
	Stale  bool // the file changed and cannot be used, or cannot be read
	Err    string
	Loaded time.Time // when the keys in use were read
}

// OpenKeys reads the file for the first time; here an error is final.
func OpenKeys(path string) (*Keys, error) {
	k := &Keys{path: path}
	if _, err := k.Reload(); err != nil {
		return nil, err
	}
	return k, nil
}

// Reload reads the file if it changed or if the last reading failed.
func (k *Keys) Reload() (changed bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() { k.err = err }()
	f, err := os.Open(k.path) // follows symlinks: what is read is one file, whole
	if err != nil {
		return false, fmt.Errorf("keys: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return false, fmt.Errorf("keys: %w", err)
	}
	if k.err == nil && k.seen != nil && os.SameFile(info, k.seen) &&
		info.ModTime().Equal(k.seen.ModTime()) && info.Size() == k.seen.Size() {
		return false, nil
	}
	if info.Size() > maxKeyFile {
		return false, fmt.Errorf("keys: %s has %d bytes; allowed are %d", k.path, info.Size(), maxKeyFile)
	}
	var buf bytes.Buffer
	if _, err := buf.ReadFrom(f); err != nil {
		return false, fmt.Errorf("keys: %w", err)
	}
	ring, err := parseKeys(k.path, buf.Bytes())
	if err != nil {
		return false, fmt.Errorf("keys: %w", err)
	}
	k.cur.Store(&ring)
	k.seen, k.loaded = info, time.Now()
	return true, nil
}

// Run looks at the file every second until ctx ends.
func (k *Keys) Run(ctx context.Context, log *slog.Logger) error {
	t := time.NewTicker(keysEvery)
	defer t.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		changed, err := k.Reload()
		switch {
		case err != nil && err.Error() != said:
			said = err.Error()
			log.Error("the keys of before stay in use", "err", err)
		case err == nil && (changed || said != ""):
			said = ""
			log.Info("keys read", "path", k.path, "keys", k.State().Keys)
		}
	}
}

// State tells what is in use.
func (k *Keys) State() KeysState {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := KeysState{Keys: len(*k.cur.Load()), Stale: k.err != nil, Loaded: k.loaded}
	if k.err != nil {
		s.Err = k.err.Error()
	}
	return s
}

// tenant finds the tenant of a presented key. The hash is what is compared:
// the time it takes tells nothing of the keys.
func (k *Keys) tenant(key string) (grant.TenantID, bool) {
	if key == "" || len(key) > maxKeyLen {
		return "", false
	}
	t, ok := (*k.cur.Load())[sha256.Sum256([]byte(key))]
	return t, ok
}
