package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/cmd/internal/conf"
)

// TestHelpExamples proves that what the help offers to copy keeps the 97 %
// promise: every call of stipend bounds with numbers, and the policy file.
func TestHelpExamples(t *testing.T) {
	calls, files := 0, 0
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		for line := range strings.Lines(c.Example) {
			args := strings.Fields(line)
			if len(args) < 3 || args[0] != "stipend" || args[1] != "bounds" || args[2] != "--rate" {
				continue
			}
			calls++
			var out, errOut bytes.Buffer
			if code := run(context.Background(), append(args[1:], "-o", "json"), nil, &out, &errOut); code != 0 {
				t.Errorf("%s: %s: exit code %d: %s", c.CommandPath(), line, code, &errOut)
				continue
			}
			var got boundsJSON
			if err := json.Unmarshal(out.Bytes(), &got); err != nil {
				t.Fatal(err)
			}
			if !got.Full || len(got.Warn) > 0 || got.RhoPPB != defaultRhoPPB {
				t.Errorf("%s: %s: promise %v, rho %d, warnings %q", c.CommandPath(), line, got.Full, got.RhoPPB, got.Warn)
			}
		}
		if _, file, ok := strings.Cut(c.Example, "A policy file:\n"); ok {
			files++
			list, err := conf.ParsePolicies("example", []byte(file))
			if err != nil {
				t.Fatalf("%s: %v", c.CommandPath(), err)
			}
			for _, one := range list {
				if w := bounds.Warnings(one.Policy, 0); len(w) > 0 {
					t.Errorf("%s: tenant %q: %q", c.CommandPath(), one.Tenant, w)
				}
			}
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(newRoot())
	if calls < 4 || files != 1 {
		t.Errorf("%d calls and %d files seen; want 4 or more, and 1", calls, files)
	}
}

// TestInterrupted proves that a call to the authority that a signal ends has
// exit code 130.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var out, errOut bytes.Buffer
	if code := run(ctx, []string{"policy", "list", "--authority", "127.0.0.1:1"}, nil, &out, &errOut); code != 130 || errOut.String() != "stipend: interrupted\n" {
		t.Errorf("exit code %d: %s", code, &errOut)
	}
}
