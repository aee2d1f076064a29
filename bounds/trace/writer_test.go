package trace

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stipend/stipend/proto/grant"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testConfig = WriterConfig{Header: Header{"gw-1", "monotonic:1"}, Buffer: MinBuffer, Every: time.Second}

func newWriter(t interface {
	Helper()
	Fatal(...any)
}, w io.Writer) *Writer {
	t.Helper()
	tw, err := NewWriter(w, testConfig)
	if err != nil {
		t.Fatal(err)
	}
	return tw
}

// What is written is read back: the encoding of names is injective (cases 27
// and 28), and every record that can be written can be read.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.SampledFrom([]string{"a:b", "b:c", "1.2.3.4", "a b", "é", `a"b\`, "a\u200bb", "#end"}), rapid.String())
		var b bytes.Buffer
		w := newWriter(t, &b)
		var want []Record
		var lost uint64
		for range rapid.IntRange(0, 20).Draw(t, "records") {
			r := Record{
				At: grant.Instant(rapid.Int64Range(-1<<61, 1<<61).Draw(t, "at")), Tenant: grant.TenantID(name.Draw(t, "tenant")),
				Class: grant.RouteClass(rapid.StringMatching(`[a-zA-Z0-9_.-]{1,64}`).Draw(t, "class")),
				Cost:  grant.Units(rapid.Int64Range(-1, 1<<62).Draw(t, "cost")), Owner: grant.Owner(name.Draw(t, "owner")),
				Path: Path(rapid.IntRange(0, 5).Draw(t, "path")), Stage: Stage(rapid.IntRange(0, 2).Draw(t, "stage")),
			}
			switch err := w.Append(r); {
			case err == nil:
				want = append(want, r)
			default:
				lost++
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if w.Lost() != lost {
			t.Fatalf("lost %d, want %d", w.Lost(), lost)
		}
		r, err := Open(Admissions, &b, Options{Window: 1<<63 - 1})
		if err != nil {
			t.Fatal(err)
		}
		got := map[int64]Record{}
		for rec, err := range r.Records() {
			if err != nil {
				t.Fatal(err)
			}
			line := rec.Line
			rec.Line, rec.File = 0, ""
			got[line] = rec
		}
		if s := r.Stats(); len(got) != len(want) || s.Lost != lost || !s.Complete {
			t.Fatalf("read %d, want %d; %+v", len(got), len(want), s)
		}
		seen := map[Record]int{}
		for _, rec := range got {
			seen[rec]++
		}
		for _, rec := range want {
			if seen[rec]--; seen[rec] < 0 {
				t.Fatalf("not read back: %+v", rec)
			}
		}
	})
}

// A full queue loses records, never waits, and the file says how many were
// lost where: written and lost add up to what was appended.
func TestLostLinesAreVisible(t *testing.T) {
	var b bytes.Buffer
	w := newWriter(t, &b)
	const total = 1000
	refused := uint64(0)
	for i := range total {
		if err := w.Append(Record{At: grant.Instant(i), Tenant: "t", Class: "c"}); errors.Is(err, ErrLost) {
			refused++
		}
		if len(w.buf) > MinBuffer {
			t.Fatalf("the buffer has %d bytes", len(w.buf))
		}
		if i == total/2 {
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if refused == 0 || refused != w.Lost() {
		t.Fatalf("refused %d, lost %d", refused, w.Lost())
	}
	if n := strings.Count(b.String(), "#lost "); n != 2 {
		t.Errorf("%d lines say what was lost, want one per gap", n)
	}
	r, err := Open(Admissions, &b, Options{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, r)
	if err != nil || uint64(len(got))+r.Stats().Lost != total || r.Stats().Lost != refused {
		t.Errorf("%d read, %+v, %v", len(got), r.Stats(), err)
	}
	if err := w.Append(Record{Tenant: "t", Class: "c"}); !errors.Is(err, ErrLost) {
		t.Errorf("after Close: %v", err)
	}
}

// Many goroutines append and flush while Run writes; nothing is lost twice or
// forgotten, and Run closes the file when its context ends.
func TestConcurrentAppend(t *testing.T) {
	var b bytes.Buffer
	w := newWriter(t, &b)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	var wg sync.WaitGroup
	const each, n = 500, 8
	for g := range n {
		wg.Go(func() {
			for i := range each {
				w.Append(Record{At: grant.Instant(i), Tenant: "t", Class: "c", Cost: grant.Units(g)})
				if i%100 == 0 {
					w.Flush()
				}
			}
		})
	}
	wg.Wait()
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	r, err := Open(Admissions, &b, Options{Window: each})
	if err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, r)
	if s := r.Stats(); err != nil || uint64(len(got))+s.Lost != each*n || s.Lost != w.Lost() || !s.Complete {
		t.Errorf("%d read, %+v, %v", len(got), s, err)
	}
}

// Run writes on its interval, and at once when the buffer is half full.
func TestRunFlushes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b sink
		w := newWriter(t, &b)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		w.Append(Record{Tenant: "t", Class: "c"})
		synctest.Wait()
		if len(b.String()) != 0 {
			t.Error("written before the interval")
		}
		<-time.After(testConfig.Every + 1)
		synctest.Wait()
		if strings.Count(b.String(), "\n") != 2 {
			t.Errorf("after the interval: %q", b.String())
		}
		before := len(b.String())
		for len(b.String()) == before && w.Lost() == 0 {
			w.Append(Record{Tenant: "t", Class: "c"})
			synctest.Wait()
		}
		if w.Lost() > 0 || len(b.String()) < MinBuffer/2 {
			t.Errorf("half full: %d bytes written, %d lost", len(b.String()), w.Lost())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// sink is a file that is read while it is written.
type sink struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *sink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *sink) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

type brokenDisk struct{ after int }

func (d *brokenDisk) Write(p []byte) (int, error) {
	if d.after -= len(p); d.after < 0 {
		return 0, errors.New("no space left")
	}
	return len(p), nil
}

// A failed write is final, and what it held counts as lost.
func TestFailedWrite(t *testing.T) { synctest.Test(t, testFailedWrite) }

func testFailedWrite(t *testing.T) {
	w := newWriter(t, &brokenDisk{after: 150})
	w.Append(Record{Tenant: "t", Class: "c"})
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.Append(Record{Tenant: strings50, Class: "c"})
	}
	err := w.Flush()
	if err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Fatal(err)
	}
	if w.Append(Record{Tenant: "t", Class: "c"}) == nil || w.Lost() != 4 || w.Close() == nil || w.Run(context.Background()) == nil {
		t.Errorf("after the failure: %d lost", w.Lost())
	}
}

const strings50 = "12345678901234567890123456789012345678901234567890"

func TestWriterConfig(t *testing.T) {
	for field, edit := range map[string]func(*WriterConfig){
		"recorder": func(c *WriterConfig) { c.Header.Recorder = "" },
		"clock":    func(c *WriterConfig) { c.Header.Clock = "a\nb" },
		"buffer":   func(c *WriterConfig) { c.Buffer = MinBuffer - 1 },
		"every":    func(c *WriterConfig) { c.Every = 0 },
	} {
		c := testConfig
		edit(&c)
		if _, err := NewWriter(io.Discard, c); err == nil || !strings.Contains(err.Error(), field) || !strings.Contains(err.Error(), "allowed") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func BenchmarkAppend(b *testing.B) {
	c := testConfig
	c.Buffer = 1 << 20
	w, _ := NewWriter(io.Discard, c)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		w.Append(Record{At: grant.Instant(i), Tenant: "acme", Class: "read", Cost: 1, Owner: "gw-1"})
		if i%4096 == 0 {
			w.Flush()
		}
	}
}
