package demo

import (
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stipend/stipend/cmd/internal/conf"
)

// Names in the agents' metrics pages.
const (
	metricGrantRequests = "stipend_agent_grant_requests_total"
	metricChecks        = "stipend_agent_checks_total"
	metricDecision      = "stipend_agent_decision_seconds"
	metricMessages      = "stipend_agent_link_batches_total"
)

// agentFiles is one agent's.
type agentFiles struct {
	name         string
	proxy, admin string // host:port
	config       string
}

// files is what the demo writes, and where everything listens.
type files struct {
	dir           string
	programs      binaries
	authority     string // host:port of gRPC
	authorityHTTP string
	backend       string
	config        string // of the authority
	data          string
	policies      string
	keys          string
	folder        string // of the agents' records
	agents        [gateways]agentFiles
	// d of the bound, and the longest wait for a decision.
	forward, deadline time.Duration
}

// writeFiles chooses ports and writes all configuration.
func writeFiles(dir string, p *plan, backend string, b binaries) (*files, error) {
	f := &files{
		dir: dir, programs: b, backend: backend,
		config: filepath.Join(dir, "authority.yaml"), data: filepath.Join(dir, "authority"),
		policies: filepath.Join(dir, "policies.yaml"), keys: filepath.Join(dir, "keys"),
		folder:   filepath.Join(dir, "records"),
		deadline: 100 * time.Millisecond, forward: 250 * time.Millisecond,
	}
	if err := os.MkdirAll(f.folder, 0o755); err != nil {
		return nil, err
	}
	ports, err := freePorts(2 + 2*gateways)
	if err != nil {
		return nil, err
	}
	f.authority, f.authorityHTTP = ports[0], ports[1]
	var policies []conf.TenantPolicy
	var keys strings.Builder
	for _, t := range p.tenants {
		policies = append(policies, conf.TenantPolicy{Tenant: t.id, Policy: t.policy})
		for _, k := range t.keys {
			fmt.Fprintf(&keys, "sha256:%x %s\n", sha256.Sum256([]byte(k)), t.id)
		}
	}
	write := func(path string, data []byte) {
		if err == nil {
			err = os.WriteFile(path, data, 0o600)
		}
	}
	write(f.policies, conf.PoliciesYAML(policies))
	write(f.keys, []byte(keys.String()))
	write(f.config, fmt.Appendf(nil, "listen: %s\nhttp: %s\ndata: %s\n", f.authority, f.authorityHTTP, f.data))
	for i := range gateways {
		a := &f.agents[i]
		a.name = fmt.Sprintf("gw-%d", i+1)
		a.proxy, a.admin = ports[2+2*i], ports[3+2*i]
		a.config = filepath.Join(dir, a.name+".yaml")
		write(a.config, f.agentYAML(i, p))
	}
	return f, err
}

func (f *files) agentYAML(i int, p *plan) []byte {
	a := &f.agents[i]
	var b strings.Builder
	fmt.Fprintf(&b, "owner: %s\nadmin: %s\nauthority: {target: %s}\n", a.name, a.admin, f.authority)
	b.WriteString("drain_time: 1s\n") // nobody spends any more: what is held is discarded
	fmt.Fprintf(&b, "gate: {deadline: %v, max_forward_delay: %v}\n", f.deadline, f.forward)
	fmt.Fprintf(&b, "proxy: {listen: %s, backend: %q}\nrecord: {folder: %s}\n", a.proxy, "http://"+f.backend, f.folder)
	// The load and the gateways share a host: its count header is believed.
	fmt.Fprintf(&b, "identity:\n  key_file: %s\n  trusted_peers: [127.0.0.1/32]\nroutes:\n", f.keys)
	for _, r := range p.routes {
		fmt.Fprintf(&b, "  - {pattern: %q, class: %s", r.pattern, r.class)
		if r.counted {
			fmt.Fprintf(&b, ", count_header: %s, max_count: 1000000000", countHeader)
		}
		b.WriteString("}\n")
	}
	return []byte(b.String())
}

func (f *files) authorityArgs() []string { return []string{"--config", f.config, "--init"} }

func (f *files) agentArgs(i int) []string {
	return []string{"--config", f.agents[i].config}
}

// records lists the agents' records: one file for each of their lives.
func (f *files) records() ([]string, error) {
	list, err := filepath.Glob(filepath.Join(f.folder, "*.admissions"))
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("the agents wrote no records in %s", f.folder)
	}
	return list, err
}

// byHand are the commands that start the pieces again, without the demo.
func (f *files) byHand(p *plan) []string {
	self, err := os.Executable()
	if err != nil || strings.Contains(self, "go-build") {
		self = "stipend"
	}
	out := []string{
		fmt.Sprintf("cd %s", quote(f.dir)),
		fmt.Sprintf("%s demo backend --listen %s &", self, f.backend),
		fmt.Sprintf("%s --config authority.yaml --init &", f.programs.authority),
		fmt.Sprintf("%s policy apply -f policies.yaml --authority %s", self, f.authority),
	}
	for i := range f.agents {
		out = append(out, fmt.Sprintf("%s --config %s.yaml &", f.programs.agent, f.agents[i].name))
	}
	first := p.tenants[0]
	method, path, more := "GET", "/items", ""
	if r := p.routes[0]; r.counted {
		method, path, more = "POST", "/v1/complete", fmt.Sprintf(" -H '%s: 100'", countHeader)
	}
	return append(out,
		fmt.Sprintf("curl -i -X %s -H '%s: %s'%s http://%s%s", method, keyHeader, first.keys[0], more, f.agents[0].proxy, path),
		fmt.Sprintf("%s tenant show %s --authority %s", self, quote(string(first.id)), f.authority),
		fmt.Sprintf("%s verify records/* --policy policies.yaml --forward-delay %v", self, f.forward),
		fmt.Sprintf("kill %%1 %%2 %%3 %%4 %%5; rm -r %s", quote(f.dir)),
	)
}

// quote guards a word from the shell.
func quote(s string) string {
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// tidy removes the store, which is large and of no use to anybody.
func (f *files) tidy() error { return os.RemoveAll(f.data) }

// freePorts asks the kernel for ports of loopback that are free now.
func freePorts(n int) ([]string, error) {
	var open []net.Listener
	defer func() {
		for _, l := range open {
			l.Close()
		}
	}()
	var out []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		open = append(open, l)
		out = append(out, l.Addr().String())
	}
	return out, nil
}
