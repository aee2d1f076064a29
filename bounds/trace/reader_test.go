package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
	"pgregory.net/rapid"
)

// collect reads everything and checks that it is in order of time.
func collect(t *testing.T, r *Reader) ([]Record, error) {
	t.Helper()
	var out []Record
	for rec, err := range r.Records() {
		if err != nil {
			return out, err
		}
		if len(out) > 0 && out[len(out)-1].At > rec.At {
			t.Fatalf("record %d is older than the one before", len(out))
		}
		out = append(out, rec)
	}
	return out, nil
}

func open(t *testing.T, kind Kind, file string, opts Options) *Reader {
	t.Helper()
	r, err := OpenFile(kind, filepath.Join("testdata", file), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func lines(recs []Record) string {
	var b []byte
	for i := range recs {
		b = appendRecord(b, &recs[i])
	}
	return string(b)
}

func TestAdmissionsFile(t *testing.T) {
	r := open(t, Admissions, "admissions.txt", Options{Window: 100})
	got, err := collect(t, r)
	if err != nil {
		t.Fatal(err)
	}
	want := `1000 "acme" "read" 1 "gw-1" local decision
1100 "a \"b\"" "read" 0 "" emergency forwarded
1200 "acme" "write" 5 "gw-1" central decision
1300 "é" "read" 1 "gw-1" off decision
`
	if lines(got) != want {
		t.Errorf("got\n%swant\n%s", lines(got), want)
	}
	if s := r.Stats(); s.Lost != 2 || !s.Complete || s.Torn || s.Records != 4 {
		t.Errorf("%+v", s)
	}
	if h := r.Header(); h != (Header{"gw-1", "monotonic:3f2a"}) {
		t.Errorf("%+v", h)
	}
}

func TestCombinedLog(t *testing.T) {
	r := open(t, Combined, "combined.log", Options{
		Window: 2 * time.Second,
		Class: func(method, path string) (grant.RouteClass, bool) {
			switch {
			case path == "/v1/items":
				return grant.RouteClass(strings.ToLower(method) + ".items"), true
			case method == "":
				return "garbage", true
			}
			return "", false
		},
		Price: func(c grant.RouteClass) (grant.Units, bool) { return grant.Units(len(c)), true },
	})
	got, err := collect(t, r)
	if err != nil {
		t.Fatal(err)
	}
	want := `1704189603000000000 "192.0.2.2" "post.items" 10 "" unstated forwarded
1704189605000000000 "192.0.2.1" "get.items" 9 "" unstated forwarded
1704189606000000000 "192.0.2.3" "garbage" 7 "" unstated forwarded
`
	if lines(got) != want {
		t.Errorf("got\n%swant\n%s", lines(got), want)
	}
	if s := r.Stats(); s.Refused != 2 || s.Unmapped != 1 {
		t.Errorf("%+v", s)
	}
	if r.Resolution() != time.Second {
		t.Errorf("resolution %v", r.Resolution())
	}
}

// Every column of the combined format can be chosen, also those that follow it.
func TestCombinedColumns(t *testing.T) {
	const line = `192.0.2.1 id user [x] [02/Jan/2024:10:00:07 +0000] "GET /a?b=c HTTP/1.0" 304 77 "ref" "ag \"e\" nt" 0.250 "10.0.0.7:80"`
	c := new(combined)
	if f := c.parse(line); f != nil {
		t.Fatal(f)
	}
	for name, want := range map[string]string{
		"client": "192.0.2.1", "ident": "id", "user": "user [x]", "time": "02/Jan/2024:10:00:07 +0000", "request": "GET /a?b=c HTTP/1.0",
		"method": "GET", "target": "/a?b=c", "path": "/a", "protocol": "HTTP/1.0", "status": "304", "bytes": "77",
		"referer": "ref", "agent": `ag "e" nt`, "extra1": "0.250", "extra2": "10.0.0.7:80",
	} {
		if got, f := c.field(name); f != nil || got != want {
			t.Errorf("%s = %q, %v", name, got, f)
		}
	}
	if _, f := c.field("extra3"); f == nil {
		t.Error("extra3 exists")
	}
	r, err := Open(Combined, strings.NewReader(line+"\n"), Options{Columns: Columns{Duration: "extra1", Cost: []string{"bytes"}, TenantIs: "all"}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, r)
	if err != nil || lines(got) != "1704189606750000000 \"all\" \"request\" 77 \"\" unstated forwarded\n" {
		t.Errorf("%s, %v", lines(got), err)
	}
	if r.Resolution() != time.Second+time.Millisecond {
		t.Errorf("resolution %v", r.Resolution())
	}
}

func TestCSVFile(t *testing.T) {
	r := open(t, CSV, "tokens.csv", Options{Columns: Columns{Time: "TIMESTAMP", Tenant: "Tenant", Cost: []string{"ContextTokens", "GeneratedTokens"}, OwnerIs: "gw"}})
	got, err := collect(t, r)
	want := `1700158623979960000 "acme" "request" 4818 "gw" unstated forwarded
1700158624031960000 "acme" "request" 3188 "gw" unstated forwarded
1700158624078149000 "b:c" "request" 137 "gw" unstated forwarded
`
	if err != nil || lines(got) != want {
		t.Errorf("got\n%swant\n%s%v", lines(got), want, err)
	}
	if r.Resolution() != 100*time.Nanosecond {
		t.Errorf("resolution %v", r.Resolution())
	}
}

func TestJSONLinesFile(t *testing.T) {
	r := open(t, JSONLines, "events.jsonl", Options{Columns: Columns{Time: "ts", Tenant: "user.tenant", Cost: []string{"cost"}, Class: "op", Status: "status"}})
	got, err := collect(t, r)
	want := `1700000000250000000 "acme" "read" 3 "" unstated forwarded
1700000001000000000 "b" "write" 5 "" unstated forwarded
`
	if err != nil || lines(got) != want {
		t.Errorf("got\n%swant\n%s%v", lines(got), want, err)
	}
	if r.Resolution() != 10*time.Millisecond {
		t.Errorf("resolution %v", r.Resolution())
	}
}

// A fault names file, line, field, what was given and what is allowed.
func TestFaults(t *testing.T) {
	const head = "#stipend-admissions 1 recorder=\"r\" clock=\"c\" unit=ns\n"
	csvColumns := Columns{Time: "t", Tenant: "who", Cost: []string{"a", "b"}}
	jsonColumns := Columns{Time: "t", Tenant: "who", Cost: []string{"a"}}
	for _, tt := range []struct {
		name  string
		kind  Kind
		opts  Options
		input string
		want  string // part of the error
	}{
		{"empty", Admissions, Options{}, "", "f: header: nothing"},
		{"no header", Admissions, Options{}, "1 \"a\"\n", `f:1: header: "1 \"a\""`},
		{"version", Admissions, Options{}, "#stipend-admissions 2 recorder=\n", `f:1: version: "2"; allowed: 1`},
		{"time", Admissions, Options{}, head + "x \"a\" \"r\" 1 \"o\" local decision\n", `f:2: time: "x"; allowed: a whole number`},
		{"tenant", Admissions, Options{}, head + "1 \"\" \"r\" 1 \"o\" local decision\n", `f:2: tenant: tenant: is empty`},
		{"unquoted", Admissions, Options{}, head + "1 a \"r\" 1 \"o\" local decision\n", `f:2: tenant: "a `},
		{"back quotes", Admissions, Options{}, head + "1 `a` \"r\" 1 \"o\" local decision\n", "double quotes"},
		{"cost", Admissions, Options{}, head + "1 \"a\" \"r\" -1 \"o\" local decision\n", `f:2: cost: "-1"; allowed: a whole number from 0`},
		{"path", Admissions, Options{}, head + "1 \"a\" \"r\" 1 \"o\" here decision\n", `f:2: path: "here"; allowed: local, central`},
		{"stage", Admissions, Options{}, head + "1 \"a\" \"r\" 1 \"o\" local decision \n", `the end of the line`},
		{"other comment", Admissions, Options{}, head + "#note\n", `f:2: time: "#note"`},
		{"blank", Admissions, Options{}, head + "\n", `f:2: time: ""`},
		{"lines missing", Admissions, Options{}, head + "#end lines=1 lost=0\n", `f:2: end: 1 records and 0 lost, where 0 and 0 were read`},
		{"loss not said", Admissions, Options{}, head + "#end lines=0 lost=3\n", `f:2: end: 0 records and 3 lost, where 0 and 0 were read`},
		{"after the end", Admissions, Options{}, head + "#end lines=0 lost=0\n1 \"a\" \"r\" 1 \"o\" local decision\n", `f:3: line: `},
		{"another clock", Admissions, Options{}, head + "#stipend-admissions 1 recorder=\"r\" clock=\"d\" unit=ns\n", `f:2: clock: "d"`},
		{"order", Admissions, Options{Window: 5}, head + "20 \"a\" \"r\" 1 \"o\" local decision\n14 \"a\" \"r\" 1 \"o\" local decision\n",
			`f:3: time: 14 ns, 6ns older than 20 ns in line 2; allowed: records at most the window of 5ns older than one before them; widen the window or sort the file`},
		{"held", Admissions, Options{Window: 5, MaxHeld: 1}, head + "20 \"a\" \"r\" 1 \"o\" local decision\n21 \"a\" \"r\" 1 \"o\" local decision\n",
			`f:3: time: more than 1 records within the window`},
		{"long line", Admissions, Options{MaxLine: 256}, head + strings.Repeat("1", 257) + "\n", `f:2: line: "1111`},
		{"long line without end", CSV, Options{MaxLine: 256, Columns: csvColumns}, strings.Repeat("x", 1<<20), `f:1: line: "xxxx`},

		{"no time", Combined, Options{}, "a - - \"GET / HTTP/1.1\" 200 1\n", `f:1: time: `},
		{"no status", Combined, Options{}, "a - - [02/Jan/2024:10:00:05 +0000] \"GET / HTTP/1.1\"\n", `f:1: request: `},
		{"open quote", Combined, Options{}, "a - - [02/Jan/2024:10:00:05 +0000] \"GET / 200 1\n", `a closing quote`},
		{"status", Combined, Options{}, "a - - [02/Jan/2024:10:00:05 +0000] \"GET / HTTP/1.1\" OK 1\n", `f:1: status: "OK"`},
		{"column", Combined, Options{Columns: Columns{Tenant: "who"}}, "a\n", `f: column: "who"; allowed: client, ident`},
		{"order in people's time", Combined, Options{}, "a - - [02/Jan/2024:10:00:05 +0000] \"GET / HTTP/1.1\" 200 1\na - - [02/Jan/2024:10:00:03 +0000] \"GET / HTTP/1.1\" 200 1\n",
			`f:2: time: 2024-01-02T10:00:03Z, 2s older than 2024-01-02T10:00:05Z in line 1`},

		{"empty csv", CSV, Options{Columns: csvColumns}, "", "f: header: nothing"},
		{"column", CSV, Options{Columns: csvColumns}, "t,who,a\n", `f:1: column: "b"; allowed: one of the header's: "t, who, a"`},
		{"same column", CSV, Options{Columns: csvColumns}, "t,who,a,b,a\n", `f:1: header: column "a" twice`},
		{"fields", CSV, Options{Columns: csvColumns}, "t,who,a,b\n1,x,1\n", `f:2: line: 3 fields; allowed: 4`},
		{"cost", CSV, Options{Columns: csvColumns}, "t,who,a,b\n1700000000,x,1,2.5\n", `f:2: b: "2.5"; allowed: whole units`},
		{"sum", CSV, Options{Columns: csvColumns}, "t,who,a,b\n1700000000,x,9223372036854775807,1\n", `f:2: b: "1"; allowed: a sum`},
		{"ambiguous time", CSV, Options{Columns: csvColumns}, "t,who,a,b\n12345,x,1,1\n", `state the form`},
		{"time form changes", CSV, Options{Columns: csvColumns}, "t,who,a,b\n1700000000,x,1,1\n2023-11-16 18:17:03,x,1,1\n", `f:3: time: "2023-11-16 18:17:03"; allowed: unix`},
		{"open quote", CSV, Options{Columns: csvColumns}, "t,who,a,b\n1,\"x,1,1\n", `f:2: line: the quoted field`},
		{"stray quote", CSV, Options{Columns: csvColumns}, "t,who,a,b\n1,x\"y,1,1\n", `f:2: line: a quote inside`},

		{"no object", JSONLines, Options{Columns: jsonColumns}, "[1]\n", `f:1: line: "[1]"`},
		{"null", JSONLines, Options{Columns: jsonColumns}, "null\n", `one JSON object a line`},
		{"two", JSONLines, Options{Columns: jsonColumns}, "{} {}\n", `one JSON object a line`},
		{"missing", JSONLines, Options{Columns: jsonColumns}, "{\"t\":1700000000}\n", `f:1: who: the object has no such member`},
		{"kind of value", JSONLines, Options{Columns: jsonColumns}, "{\"t\":1700000000,\"who\":\"a\",\"a\":true}\n", `f:1: a: true; allowed: a string or a number`},
		{"exponent", JSONLines, Options{Columns: jsonColumns}, "{\"t\":1700000000,\"who\":\"a\",\"a\":1e3}\n", `f:1: a: "1e3"`},
		{"control in tenant", JSONLines, Options{Columns: jsonColumns}, "{\"t\":1700000000,\"who\":\"a\\u0000\",\"a\":1}\n", `f:1: tenant: `},
		{"no time column", JSONLines, Options{Columns: Columns{Tenant: "who"}}, "", `time column: none`},
		{"no tenant", JSONLines, Options{Columns: Columns{Time: "t"}}, "", `tenant column and constant`},
		{"window", Admissions, Options{Window: -1}, "", `window: -1ns; allowed: 0s or more`},
	} {
		tt.opts.File = "f"
		r, err := Open(tt.kind, strings.NewReader(tt.input), tt.opts)
		if err == nil {
			_, err = collect(t, r)
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "allowed: ") {
			t.Errorf("%v, %s:\n got %v\nwant %s", tt.kind, tt.name, err, tt.want)
		}
	}
}

// A file whose writer died ends in a cut line: it is reported and not taken
// for a record, wherever the cut is.
func TestTornFile(t *testing.T) {
	whole, err := os.ReadFile("testdata/admissions.txt")
	if err != nil {
		t.Fatal(err)
	}
	for n := bytes.IndexByte(whole, '\n') + 1; n < len(whole); n++ {
		r, err := Open(Admissions, bytes.NewReader(whole[:n]), Options{Window: time.Second})
		if err != nil {
			t.Fatal(n, err)
		}
		got, err := collect(t, r)
		s := r.Stats()
		if err != nil || s.Complete || s.Torn != (whole[n-1] != '\n') {
			t.Fatalf("cut at %d: %+v, %v", n, s, err)
		}
		var want int
		for _, line := range bytes.SplitAfter(whole[:n], []byte("\n")) {
			if len(line) > 0 && line[0] != '#' && line[len(line)-1] == '\n' {
				want++
			}
		}
		if len(got) != want {
			t.Fatalf("cut at %d: %d records, want %d", n, len(got), want)
		}
	}
}

// A recorder that starts again may go on in the same file: each part is
// checked by itself, and the file is whole if each part is.
func TestSeveralParts(t *testing.T) {
	header := string(appendHeader(nil, Header{"r", "c"}))
	record := func(at grant.Instant) string {
		return string(appendRecord(nil, &Record{At: at, Tenant: "t", Class: "c"}))
	}
	first := header + record(1) + record(2) + "#lost 4\n"
	for input, complete := range map[string]bool{
		first + "#end lines=2 lost=4\n" + header + record(3) + "#lost 1\n#end lines=1 lost=1\n": true,
		first + header + record(3) + "#lost 1\n#end lines=1 lost=1\n":                           false, // the first one was killed
		first + "#end lines=2 lost=4\n" + header + record(3) + "#lost 1\n":                      false,
	} {
		r, err := Open(Admissions, strings.NewReader(input), Options{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := collect(t, r)
		if s := r.Stats(); err != nil || len(got) != 3 || s.Lost != 5 || s.Complete != complete {
			t.Errorf("%q: %d records, %+v, %v", input, len(got), s, err)
		}
	}
}

// Without a window nothing is held back: one record at a time is enough.
func TestNoWindowHoldsNothing(t *testing.T) {
	b := appendHeader(nil, Header{"r", "c"})
	for at := range grant.Instant(10) {
		b = appendRecord(b, &Record{At: at / 2, Tenant: "t", Class: "c"})
	}
	r, err := Open(Admissions, bytes.NewReader(b), Options{MaxHeld: 1})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := collect(t, r); err != nil || len(got) != 10 {
		t.Errorf("%d records, %v", len(got), err)
	}
}

// Bad lines are left out up to the stated number, and counted.
func TestSkipBad(t *testing.T) {
	const input = "t,who,a\n1700000000,x,1\nrubbish\n1700000001,y,z\n1700000002,z,1\n"
	for skip, want := range map[int64]int{0: -1, 1: -1, 2: 2} {
		r, err := Open(CSV, strings.NewReader(input), Options{SkipBad: skip, Columns: Columns{Time: "t", Tenant: "who", Cost: []string{"a"}}})
		if err != nil {
			t.Fatal(err)
		}
		got, err := collect(t, r)
		if (err == nil) != (want >= 0) || err == nil && (len(got) != want || r.Stats().Bad != 2 || r.Stats().FirstBad == nil) {
			t.Errorf("skip %d: %d records, %v, %+v", skip, len(got), err, r.Stats())
		}
	}
}

// Whatever is out of order by no more than the window comes out sorted, ties in
// the order of the file; one step more is refused. Never more than MaxHeld wait.
func TestWindow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		window := rapid.Int64Range(0, 50).Draw(t, "window")
		var in, newest int64
		var b bytes.Buffer
		b.Write(appendHeader(nil, Header{"r", "c"}))
		fits := true
		n := rapid.IntRange(0, 40).Draw(t, "records")
		for i := range n {
			in = newest + rapid.Int64Range(-window-1, 10).Draw(t, "step")
			if i == 0 {
				in, newest = 100, 100
			}
			fits = fits && in >= newest-window
			newest = max(newest, in)
			b.Write(appendRecord(nil, &Record{At: grant.Instant(in), Tenant: "t", Class: "c", Cost: grant.Units(i)}))
		}
		r, err := Open(Admissions, &b, Options{Window: time.Duration(window)})
		if err != nil {
			t.Fatal(err)
		}
		var got []Record
		for rec, e := range r.Records() {
			if err = e; e == nil {
				got = append(got, rec)
			}
		}
		if (err == nil) != fits {
			t.Fatalf("fits %v: %v", fits, err)
		}
		if fits && len(got) != n {
			t.Fatalf("%d records of %d", len(got), n)
		}
		for i := 1; i < len(got); i++ {
			if got[i-1].At > got[i].At || got[i-1].At == got[i].At && got[i-1].Cost > got[i].Cost {
				t.Fatalf("out of order: %v, %v", got[i-1], got[i])
			}
		}
	})
}

// Several files are judged as one; files of different clocks never are.
func TestMerge(t *testing.T) {
	file := func(clock string, at ...grant.Instant) *Reader {
		b := appendHeader(nil, Header{"r", clock})
		for _, a := range at {
			b = appendRecord(b, &Record{At: a, Tenant: "t", Class: "c", Cost: 1})
		}
		r, err := Open(Admissions, bytes.NewReader(b), Options{File: clock})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	records, err := Merge(file("c", 1, 4, 7), file("c"), file("c", 2, 4, 9))
	if err != nil {
		t.Fatal(err)
	}
	var got []grant.Instant
	for rec, err := range records {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, rec.At)
	}
	if fmt.Sprint(got) != "[1 2 4 4 7 9]" {
		t.Error(got)
	}
	if _, err := Merge(file("c"), file("d")); err == nil || !strings.Contains(err.Error(), "different clocks") {
		t.Errorf("two clocks: %v", err)
	}
	records, _ = Merge(file("c", 1, 2), file("c", 5, 4))
	var last error
	for _, err := range records {
		last = err
	}
	var e *Error
	if !errors.As(last, &e) || e.Line != 3 {
		t.Errorf("the error of one file: %v", last)
	}
	for policyBurst, held := range map[grant.Units]bool{3: true, 2: false} {
		j, _ := bounds.NewJudge(bounds.Config{}, 1, &grant.Policy{Burst: policyBurst})
		records, _ = Merge(file("c", 1, 4), file("c", 2))
		if n, err := Judge(j, records); n != 3 || err != nil || j.Held() != held {
			t.Errorf("burst %d: %d, %v, held %v", policyBurst, n, err, j.Held())
		}
	}
}

func TestGzip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.txt.gz")
	plain, err := os.ReadFile("testdata/admissions.txt")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	z.Write(plain)
	z.Close()
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := OpenFile(Admissions, path, Options{Window: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := collect(t, r); err != nil || len(got) != 4 {
		t.Errorf("%d records, %v", len(got), err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if _, err := OpenFile(Admissions, path+"x", Options{}); err == nil {
		t.Error("a missing file opened")
	}
}
