package pebblestore

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/stipend/stipend/authority/storetest"
	"github.com/stipend/stipend/proto/grant"
)

const workers = 8

// child is what a process of its own does in these tests: it writes numbered
// records from some goroutines and prints every acknowledgement, until it is
// killed or, in the role "fail", its disk fails.
func child(role string) {
	cfg := testConfig(nil, os.Getenv("STIPEND_STORE_DIR"))
	cfg.Log = nil // standard error
	d := newDisk(vfs.Default)
	if role == "fail" {
		cfg.FS = d
	}
	s, err := Open(cfg)
	if err != nil {
		fmt.Println("refused", err)
		os.Exit(3)
	}
	var all sync.WaitGroup
	var out sync.Mutex
	for p := range grant.Partition(workers) {
		all.Go(func() {
			for n := 0; ; n++ {
				err := s.Commit(p, record(fmt.Sprintf("%06d", n), "v"))
				if err != nil {
					return // the process is ending
				}
				out.Lock()
				fmt.Println("ack", p, n)
				if role == "fail" && n == 100 {
					d.failLog(storetest.Kept)
				}
				out.Unlock()
			}
		})
	}
	all.Wait()
}

func startChild(t *testing.T, role, dir string) (*exec.Cmd, *bufio.Scanner, *strings.Builder) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+role, "STIPEND_STORE_DIR="+dir)
	stderr := new(strings.Builder)
	cmd.Stderr = stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return cmd, bufio.NewScanner(out), stderr
}

// TestProcessDeath: kill -9 in the middle of commits, and the end that a failed
// sync brings by default, lose nothing that was acknowledged; while the process
// lives nobody else gets the store.
func TestProcessDeath(t *testing.T) {
	for _, role := range []string{"kill", "fail"} {
		t.Run(role, func(t *testing.T) {
			dir := t.TempDir()
			mustClose(t, mustCreate(t, testConfig(nil, dir)))
			cmd, lines, stderr := startChild(t, role, dir)
			var acked [workers]int
			total := 0
			for lines.Scan() {
				var p, n int
				if _, err := fmt.Sscanf(lines.Text(), "ack %d %d", &p, &n); err != nil {
					t.Errorf("child says %q", lines.Text())
					continue
				}
				acked[p] = n + 1
				switch total++; {
				case role == "kill" && total == 500:
					refused(t, testConfig(nil, dir), ErrLocked, ErrExists, "another process")
				case role == "kill" && total == 1000:
					if err := cmd.Process.Kill(); err != nil {
						t.Fatal(err)
					}
				}
			}
			err := cmd.Wait()
			if exit := new(exec.ExitError); role == "fail" && (!errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(stderr.String(), "the store has failed and the process ends")) {
				t.Errorf("the process ended with %v and said:\n%s", err, stderr)
			}
			if total < 100 {
				t.Fatalf("%d commits: too few to mean anything", total)
			}
			s, err := Open(testConfig(nil, dir))
			if err != nil {
				t.Fatal(err)
			}
			defer mustClose(t, s)
			for p := range grant.Partition(workers) {
				n := 0
				if err := s.Load(p, func(k, v []byte) error {
					if want := fmt.Sprintf("%06d", n); string(k) != want || string(v) != "v" {
						return fmt.Errorf("found %q, want %s", k, want)
					}
					n++
					return nil
				}); err != nil || n < acked[p] {
					t.Errorf("partition %d holds %d records of %d acknowledged: %v", p, n, acked[p], err)
				}
			}
		})
	}
}
