package trace

import (
	"bytes"
	"encoding/csv"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// checkReader: whatever the input, a reader ends, yields valid records in order
// of time, says what is wrong with line and allowed, and reads the same twice.
func checkReader(t *testing.T, kind Kind, input []byte, opts Options) {
	opts.MaxHeld, opts.MaxLine = 64, 512
	read := func() ([]Record, error) {
		r, err := Open(kind, bytes.NewReader(input), opts)
		if err != nil {
			return nil, err
		}
		return collect(t, r)
	}
	got, err := read()
	again, err2 := read()
	if !slices.Equal(got, again) || (err == nil) != (err2 == nil) {
		t.Fatal("two readings differ")
	}
	var e *Error
	if err != nil && (!errors.As(err, &e) || e.Allowed == "" || e.Given == "") {
		t.Fatalf("not an error for people: %v", err)
	}
	for i := range got {
		if f := got[i].validate(); f != nil {
			t.Fatalf("%+v: %v", got[i], f)
		}
		line := strings.TrimSuffix(string(appendRecord(nil, &got[i])), "\n")
		back, f := parseRecord(line)
		back.Line, back.File = got[i].Line, got[i].File
		if f != nil || back != got[i] {
			t.Fatalf("%s: read back %+v, %v", line, back, f)
		}
	}
}

func addFile(f *testing.F, file string) {
	b, err := os.ReadFile("testdata/" + file)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b, int64(time.Second))
}

func FuzzAdmissions(f *testing.F) {
	addFile(f, "admissions.txt")
	f.Fuzz(func(t *testing.T, input []byte, window int64) {
		checkReader(t, Admissions, input, Options{Window: time.Duration(max(0, window))})
	})
}

func FuzzCombined(f *testing.F) {
	addFile(f, "combined.log")
	f.Fuzz(func(t *testing.T, input []byte, window int64) {
		checkReader(t, Combined, input, Options{Window: time.Duration(max(0, window)), SkipBad: 2, Columns: Columns{Cost: []string{"bytes"}}})
	})
}

func FuzzCSV(f *testing.F) {
	addFile(f, "tokens.csv")
	f.Fuzz(func(t *testing.T, input []byte, window int64) {
		checkReader(t, CSV, input, Options{
			Window: time.Duration(max(0, window)), SkipBad: 1,
			Columns: Columns{Time: "TIMESTAMP", Tenant: "Tenant", Cost: []string{"ContextTokens", "GeneratedTokens"}},
		})
	})
}

func FuzzJSONLines(f *testing.F) {
	addFile(f, "events.jsonl")
	f.Fuzz(func(t *testing.T, input []byte, window int64) {
		checkReader(t, JSONLines, input, Options{
			Window: time.Duration(max(0, window)), SkipBad: 1,
			Columns: Columns{Time: "ts", Tenant: "user.tenant", Cost: []string{"cost"}, Status: "status", Class: "op"},
		})
	})
}

// A line is taken apart as encoding/csv does, where both accept it.
func FuzzCSVLine(f *testing.F) {
	for _, s := range []string{`a,b`, `"a ""b""",c`, `,`, `"a"b,c`, `a"b`, `""`, `"a`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		if strings.ContainsAny(line, "\r\n") || line == "" {
			return
		}
		r := csv.NewReader(strings.NewReader(line))
		want, err := r.Read()
		got, fault := splitCSV(line, ',', nil)
		if (err == nil) != (fault == nil) {
			t.Fatalf("%q: %v, encoding/csv says %v", line, fault, err)
		}
		if err == nil && !slices.Equal(got, want) {
			t.Fatalf("%q: %q, want %q", line, got, want)
		}
	})
}
