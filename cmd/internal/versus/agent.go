package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const agentLimit = 20_000_000 // bytes of the stripped program

// heavy are modules that must not come with a sidecar.
var heavy = []string{"github.com/cockroachdb/pebble", "go.etcd.io/"}

func measureAgent(ctx context.Context, r *run) error {
	if _, err := os.Stat("cmd/stipend-agent"); err != nil {
		return missingError("there is no cmd/stipend-agent here: run from the root of the repository")
	}
	if err := r.build(ctx, "stipend-agent", "stipend-authority"); err != nil {
		return err
	}
	program := filepath.Join(r.bin, "stipend-agent")
	info, err := os.Stat(program)
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "go", "version", "-m", program).Output()
	if err != nil {
		return fmt.Errorf("go version -m: %w", err)
	}
	var carried []string
	for _, module := range heavy {
		if bytes.Contains(out, []byte("\t"+module)) {
			carried = append(carried, module)
		}
	}
	authority, err := startAuthority(ctx, r, filepath.Join(r.dir, "authority-of-agent"))
	if err != nil {
		return err
	}
	ready, err := r.agentStarts(ctx, program, authority.addr)
	if err := errors.Join(err, authority.close()); err != nil {
		return err
	}
	t := newTable("what", "measured", "wanted")
	t.row("stripped program, MB", fmt.Sprintf("%.1f", float64(info.Size())/1e6), fmt.Sprintf("< %.1f", float64(agentLimit)/1e6))
	t.row("Pebble or etcd in it", orNone(carried), "none")
	t.row("start of the process to readiness, ms", ready.text("%.0f"), "< 100")
	t.print(r.out)
	return nil
}

func orNone(s []string) string {
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, ", ")
}

// agentStarts measures from the start of the process to the first 200 of its
// readiness page, asked every 2 ms, with an authority that is up.
func (r *run) agentStarts(ctx context.Context, program, authority string) (series, error) {
	var took series
	for n := range max(r.Pairs, 5) {
		args, url, err := agentArgs(filepath.Join(r.dir, fmt.Sprintf("agent-%d", n)), authority)
		if err != nil {
			return nil, err
		}
		began := time.Now()
		c, err := start(ctx, program, args...)
		if err != nil {
			return nil, err
		}
		err = c.until(ctx, 10*time.Second, httpOK(url))
		took = append(took, float64(time.Since(began).Microseconds())/1000)
		if err := errors.Join(err, c.stop()); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// agentArgs writes the smallest configuration with which an agent serves.
func agentArgs(dir, authority string) (args []string, ready string, err error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, "", err
	}
	config, keys := filepath.Join(dir, "agent.yaml"), filepath.Join(dir, "keys")
	var ports [2]int
	for i := range ports {
		if ports[i], err = freePort(); err != nil {
			return nil, "", err
		}
	}
	key := sha256.Sum256([]byte("secret"))
	err = errors.Join(
		os.WriteFile(config, []byte("routes:\n  - {pattern: \"GET /x\", class: op}\n"), 0o600),
		os.WriteFile(keys, fmt.Appendf(nil, "sha256:%x tenant-a\n", key), 0o600),
	)
	admin := fmt.Sprintf("127.0.0.1:%d", ports[0])
	return []string{
		"--config", config, "--identity-key-file", keys, "--authority-target", authority, "--owner", filepath.Base(dir),
		"--auth-listen", fmt.Sprintf("127.0.0.1:%d", ports[1]), "--auth-source", "request", "--admin", admin,
	}, "http://" + admin + "/readyz", err
}
