package main

import (
	"compress/gzip"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"stipend": main, "stipend-authority": authorityMain, "stipend-agent": agentMain,
	})
}

// TestScripts proves what a person sees: output, errors that say what to do
// and exit codes, of the command as a process.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       os.Getenv("STIPEND_REWRITE") != "",
		Cmds:                map[string]func(*testscript.TestScript, bool, []string){"exits": exits},
		Setup: func(e *testscript.Env) error {
			raw, err := os.ReadFile(filepath.Join(e.WorkDir, "calls.csv"))
			if os.IsNotExist(err) {
				return nil
			} else if err != nil {
				return err
			}
			f, err := os.Create(filepath.Join(e.WorkDir, "calls.csv.gz"))
			if err != nil {
				return err
			}
			defer f.Close()
			z := gzip.NewWriter(f)
			z.Write(raw)
			return z.Close()
		},
	})
}

// TestDemo proves that the demo, in short form and with the real daemons as
// processes, ends with the bound held, and that its verdict is what it says.
func TestDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes and load")
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/demo",
		RequireExplicitExec: true,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "judged": judged, "interrupted": interruptedAfter,
		},
		Condition: func(cond string) (bool, error) {
			name, ok := strings.CutPrefix(cond, "env:")
			if !ok {
				return false, fmt.Errorf("unknown condition %q", cond)
			}
			return os.Getenv(name) != "", nil
		},
		Setup: func(e *testscript.Env) error {
			e.Setenv("STIPEND_TRACES", os.Getenv("STIPEND_TRACES"))
			return traceFiles(e.WorkDir)
		},
	})
}

// exits N COMMAND... runs a command that must end with exit code N.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND...")
	}
	err := ts.Exec(args[1], args[2:]...)
	code := 0
	if e, ok := err.(*exec.ExitError); ok {
		code = e.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if strconv.Itoa(code) != args[0] {
		ts.Fatalf("exit code %d, want %s\n%s%s", code, args[0], ts.ReadFile("stdout"), ts.ReadFile("stderr"))
	}
}
