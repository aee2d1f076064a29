package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stipend/stipend/agent/daemon"
	"github.com/stipend/stipend/cmd/internal/conf"
)

// load reads a configuration as the command does.
func load(t *testing.T, yaml string) error {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(path, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := daemon.DefaultConfig()
	err := conf.Load(path, &cfg, conf.Sources{})
	if err != nil {
		err = fmt.Errorf("%s", strings.ReplaceAll(err.Error(), path, "agent.yaml"))
	}
	return err
}

// The documented configurations are whole and load.
func TestDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/gateways.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(doc), "```yaml\n")[1:]
	if len(blocks) < 2 {
		t.Fatalf("%d configurations in docs/gateways.md", len(blocks))
	}
	for _, block := range blocks {
		block, _, _ = strings.Cut(block, "```")
		if err := load(t, block); err != nil {
			t.Errorf("%v\nin\n%s", err, block)
		}
	}
}

// What is reported of a faulty configuration, with the cause first.
func TestFaults(t *testing.T) {
	const sound = "owner: gw\nidentity: {key_file: keys}\nproxy: {listen: \":1\", backend: \"http://127.0.0.1:2\"}\n"
	const routes = "routes: [{pattern: /a, class: a}]\n"
	for _, c := range []struct {
		what, yaml string
		want       []string // the lines begin so
	}{
		{"sound", sound + routes, nil},
		{"a misspelt key", sound + "rutes: [{pattern: /a, class: a}]\n", []string{
			"agent.yaml:4:1: rutes: is no known key; did you mean routes?",
			"agent.yaml:1:1: routes: none given; allowed: 1 to 4096 of {pattern, class}",
		}},
		{"an endpoint without a source", sound + routes + "auth: {listen: \":3\"}\n", []string{
			"agent.yaml:5:7: auth.source: not given; allowed: x-forwarded (Caddy, Traefik), x-original (nginx), request (Envoy)",
		}},
		{"a source that guesses", sound + routes + "auth: {listen: \":3\", source: auto}\n", []string{
			`agent.yaml:5:30: auth.source: "auto"; allowed: x-forwarded (Caddy, Traefik), x-original (nginx), request (Envoy)`,
		}},
		{"a count from nobody", sound + "routes: [{pattern: /a, class: a, count_header: X-N}]\n", []string{
			"agent.yaml:2:11: identity.trusted_peers: none; allowed: the CIDRs whose X-N is believed (routes.0.count_header)",
		}},
		{"no port", sound + routes + "authority: {target: authority}\n", []string{
			`agent.yaml:5:21: authority.target: "authority"; allowed: host:port of the authority, such as authority:7400 or 127.0.0.1:7400`,
		}},
		{"two patterns in conflict", sound + "routes: [{pattern: \"/{x}\", class: a}, {pattern: \"/{y}\", class: b}]\n", []string{
			`agent.yaml:4:49: routes.1.pattern: "/{y}": pattern "/{y}" conflicts with pattern "/{x}": /{y} matches the same requests as /{x}`,
		}},
	} {
		err := load(t, c.yaml)
		var got []string
		if err != nil {
			got = strings.Split(err.Error(), "\n")
		}
		if strings.Join(got, "\n") != strings.Join(c.want, "\n") {
			t.Errorf("%s:\n%s\nwant\n%s", c.what, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
}
