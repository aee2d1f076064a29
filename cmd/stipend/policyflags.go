package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/stipend/stipend/cmd/internal/conf"
	"github.com/stipend/stipend/proto/grant"
)

// policyFlags give one policy in numbers, or a file of policies.
type policyFlags struct {
	file    string
	rate    string
	burst   int64
	owners  int
	quantum int64
	ttl     string

	fs *pflag.FlagSet
}

var policyNumbers = []string{"rate", "burst", "owners", "quantum", "ttl"}

func (f *policyFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.file, "policy", "", "policy `file` (YAML), instead of the numbers below")
	fs.StringVar(&f.rate, "rate", "", "r: units per duration: 10000/s, 600 per 1m")
	fs.Int64Var(&f.burst, "burst", 0, "B: units the bucket holds")
	fs.IntVar(&f.owners, "owners", 0, "N: gateways that may hold units at once; 0: none, every request is checked")
	fs.Int64Var(&f.quantum, "quantum", 0, "q: most units that one gateway holds")
	fs.StringVar(&f.ttl, "ttl", "10s", "life of a grant")
	f.fs = fs
}

// numbers reports whether a policy is given in numbers, and refuses both forms
// at once and none.
func (f *policyFlags) numbers() (bool, error) {
	var given []string
	for _, name := range policyNumbers {
		if f.fs.Changed(name) {
			given = append(given, "--"+name)
		}
	}
	switch {
	case f.file != "" && len(given) > 0:
		return false, badInputf("--policy stands beside %s; give the file or the numbers", strings.Join(given, ", "))
	case f.file != "":
		return false, nil
	case !f.fs.Changed("rate") || !f.fs.Changed("burst"):
		return false, badInputf("no policy is given; say --rate 100/s --burst 200 (and --owners, --quantum, --ttl), or --policy FILE")
	}
	return true, nil
}

// policy is the one given in numbers, sound.
func (f *policyFlags) policy() (*grant.Policy, error) {
	rate, err := conf.ParseRate(f.rate)
	if err != nil {
		return nil, badInputf("--rate: %w", err)
	}
	ttl, err := conf.ParseDuration(f.ttl)
	if err != nil {
		return nil, badInputf("--ttl: %w", err)
	}
	p := &grant.Policy{
		Rate: rate, Burst: grant.Units(f.burst),
		Grant: grant.GrantSettings{Quantum: grant.Units(f.quantum), Owners: f.owners, TTL: ttl},
	}
	if (f.owners == 0) != (f.quantum == 0) {
		return nil, badInputf("--owners %d and --quantum %d: grants take both; leave both out when every request is checked", f.owners, f.quantum)
	}
	var errs []error
	for _, problem := range p.Validate() {
		flag := "--" + strings.TrimPrefix(problem.Field, "grant.")
		errs = append(errs, fmt.Errorf("%s: %s; allowed: %s", flag, problem.Given, problem.Allowed))
	}
	if len(errs) > 0 {
		return nil, badInput(errors.Join(errs...))
	}
	return p, nil
}

// load reads the policy file. Its errors name file, line and key.
func (f *policyFlags) load() ([]conf.TenantPolicy, error) {
	list, err := conf.LoadPolicies(f.file)
	if err != nil {
		return nil, badInput(err)
	}
	return list, nil
}

// one picks a tenant's policy of the file.
func (f *policyFlags) one(tenant string) (*grant.Policy, error) {
	list, err := f.load()
	if err != nil {
		return nil, err
	}
	if tenant == "" && len(list) == 1 {
		return list[0].Policy, nil
	}
	if len(list) == 0 {
		return nil, badInputf("%s names no tenants; give one, or the numbers by flags (--rate, --burst)", f.file)
	}
	var names []string
	for _, t := range list {
		if string(t.Tenant) == tenant {
			return t.Policy, nil
		}
		if len(names) < 10 {
			names = append(names, string(t.Tenant))
		}
	}
	if tenant == "" {
		return nil, badInputf("%s has %s; choose one with --tenant (%s)", f.file, plural(len(list), "tenant"), strings.Join(names, ", "))
	}
	return nil, badInputf("%s has no tenant %q; it has %s", f.file, tenant, strings.Join(names, ", "))
}

// durationFlag is a duration in the notation of the files.
type durationFlag time.Duration

func (d *durationFlag) String() string { return conf.FormatDuration(time.Duration(*d)) }
func (d *durationFlag) Type() string   { return "duration" }
func (d *durationFlag) Set(s string) error {
	v, err := conf.ParseDuration(s)
	*d = durationFlag(v)
	return err
}

// defaultRhoPPB is the authority's default bound on the rate error of clocks,
// a thousandth, in parts per billion.
const defaultRhoPPB = 1_000_000

// durationsFlag is a list of durations with commas between them. The first use
// replaces the default, a repetition adds.
type durationsFlag struct {
	list  []time.Duration
	given bool
}

func (d *durationsFlag) String() string {
	words := make([]string, len(d.list))
	for i, one := range d.list {
		words[i] = conf.FormatDuration(one)
	}
	return strings.Join(words, ",")
}

func (d *durationsFlag) Type() string { return "durations" }

func (d *durationsFlag) Set(s string) error {
	var list []time.Duration
	for word := range strings.SplitSeq(s, ",") {
		v, err := conf.ParseDuration(strings.TrimSpace(word))
		if err != nil {
			return err
		}
		list = append(list, v)
	}
	if !d.given {
		d.list, d.given = nil, true
	}
	d.list = append(d.list, list...)
	return nil
}
