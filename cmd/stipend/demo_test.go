package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/rogpeppe/go-internal/testscript"

	agent "github.com/stipend/stipend/agent/daemon"
	authority "github.com/stipend/stipend/authority/daemon"
	"github.com/stipend/stipend/cmd/internal/conf"
	"github.com/stipend/stipend/cmd/stipend/demo"
)

// The processes of the demo under test are this test binary under other names:
// the daemons' own Run behind as little of a main as there can be.

func authorityMain() {
	cfg := authority.DefaultConfig()
	flag.BoolVar(&cfg.Init, "init", false, "")
	child(&cfg, func(ctx context.Context) error {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
		cfg.Store.MinFreeBytes = 0
		return authority.Run(ctx, cfg)
	})
}

func agentMain() {
	cfg := agent.DefaultConfig()
	child(&cfg, func(ctx context.Context) error {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
		return agent.Run(ctx, cfg)
	})
}

func child(cfg any, run func(context.Context) error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	path := flag.String("config", "", "")
	flag.Parse()
	err := conf.Load(*path, cfg, conf.Sources{})
	if err == nil {
		err = run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// judged FOLDER ARG... runs the demo with its verdict as JSON. The bound must
// have held, the load must have been what it is meant to be, the exit code must
// be that of the verdict, and stipend verify must find the same in the agents'
// records. Utilisation is only compared with the exit code: tests beside this
// one take the processor away, which is no fault of the product.
func judged(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: judged FOLDER ARG...")
	}
	err := ts.Exec("stipend", append([]string{"demo", "-o", "json", "--dir", args[0]}, args[1:]...)...)
	code := 0
	if e, ok := err.(*exec.ExitError); ok {
		code = e.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	var res demo.Result
	if err := json.Unmarshal([]byte(ts.ReadFile("stdout")), &res); err != nil {
		ts.Fatalf("no verdict (%v), exit code %d:\n%s", err, code, ts.ReadFile("stderr"))
	}
	if res.OK() != (code == 0) {
		ts.Fatalf("exit code %d for held %v, kept %v, strange %q", code, res.Held, res.Kept, res.Strange)
	}
	if !res.Held || res.Strange != "" {
		ts.Fatalf("the bound is broken (strange: %q)\n%s", res.Strange, ts.ReadFile("stdout"))
	}
	ts.Logf("utilisation %d ppm, kept %v, %d requests admitted", res.Use.PPM, res.Kept, res.Admitted)
	if res.Units.Died == "" || res.Admitted == 0 || len(res.Agents) == 0 {
		ts.Fatalf("no agent was killed, or nothing was admitted or recorded\n%s", ts.ReadFile("stdout"))
	}
	for _, a := range res.Answers {
		if a.Other != 0 {
			ts.Fatalf("%s got %d answers that nothing explains: %v", a.Role, a.Other, res.Notes)
		}
		if a.Role == "unverified" && (a.OK != 0 || a.Unverified == 0) {
			ts.Fatalf("unknown keys: %d admitted, %d refused", a.OK, a.Unverified)
		}
	}
	records, err := filepath.Glob(filepath.Join(ts.MkAbs(args[0]), "records", "*"))
	if err != nil || len(records) != 4 {
		ts.Fatalf("records of four lives of three agents: %v, %v", records, err)
	}
	args = append([]string{"verify", "--policy", filepath.Join(args[0], "policies.yaml"), "--forward-delay", "250ms", "--skew", "1ms"}, records...)
	if err := ts.Exec("stipend", args...); err != nil || !strings.HasPrefix(ts.ReadFile("stdout"), "bound held") {
		ts.Fatalf("stipend verify: %v\n%s%s", err, ts.ReadFile("stdout"), ts.ReadFile("stderr"))
	}
}

// interruptedAfter PATTERN COMMAND... sends SIGINT once a line of the command's
// standard error holds PATTERN. It must end with exit code 130, within the
// test's time, and leave nothing among the temporary files. What it wrote to
// standard error becomes the script's standard output.
func interruptedAfter(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: interrupted PATTERN COMMAND...")
	}
	env := []string{}
	temp := ts.MkAbs("temp")
	ts.Check(os.MkdirAll(temp, 0o755))
	for _, name := range []string{"PATH", "HOME", "WORK"} {
		env = append(env, name+"="+ts.Getenv(name))
	}
	program := ""
	for _, dir := range filepath.SplitList(ts.Getenv("PATH")) {
		if at := filepath.Join(dir, args[1]); program == "" {
			if _, err := os.Stat(at); err == nil {
				program = at
			}
		}
	}
	cmd := exec.Command(program, args[2:]...)
	cmd.Env, cmd.Dir = append(env, "TMPDIR="+temp), ts.MkAbs(".")
	stderr, err := cmd.StderrPipe()
	ts.Check(err)
	ts.Check(cmd.Start())
	sent := false
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		fmt.Fprintln(ts.Stdout(), lines.Text())
		if !sent && strings.Contains(lines.Text(), args[0]) {
			sent = true
			ts.Check(cmd.Process.Signal(os.Interrupt))
		}
	}
	err = cmd.Wait()
	var e *exec.ExitError
	if !sent || !errors.As(err, &e) || e.ExitCode() != 130 {
		ts.Fatalf("sent %v, ended with %v; want exit code 130", sent, err)
	}
	left, err := os.ReadDir(temp)
	ts.Check(err)
	if len(left) > 0 {
		ts.Fatalf("%v is left among the temporary files", left)
	}
}

// traceFiles writes a CSV of one tenant and an access log of forty clients.
func traceFiles(dir string) error {
	var csv, log strings.Builder
	csv.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range 600 {
		fmt.Fprintf(&csv, "2026-01-01 00:%02d:%02d.%03d,%d,%d\n", i/60, i%60, i%7, 100+i*37%900, i%50)
		path := []string{"/", "/images/a.png", "/presentations/x", "/files/?q=1"}[i%4]
		method := "GET"
		if i%50 == 49 {
			method = "PROPFIND" // no route knows it
		}
		fmt.Fprintf(&log, "198.18.0.%d - - [17/May/2015:10:%02d:%02d +0000] \"%s %s HTTP/1.1\" 200 %d \"-\" \"-\"\n",
			i*i%40, (i+3)/60, (i+3-i%3)%60, method, path, i)
	}
	if err := os.WriteFile(filepath.Join(dir, "calls.csv"), []byte(csv.String()), 0o600); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "access.log"), []byte(log.String()), 0o600)
}
