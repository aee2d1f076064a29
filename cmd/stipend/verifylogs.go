package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/stipend/stipend/bounds/trace"
	"github.com/stipend/stipend/proto/grant"
)

// logFlags say how the input is to be read.
type logFlags struct {
	format   string
	cost     []string
	columns  trace.Columns
	tenant   string
	class    string
	timeForm string
	unit     durationFlag
	routes   []string
	window   durationFlag
	comma    string
	skipBad  int64
	kind     trace.Kind // of the last file opened
	compiled func(method, path string) (grant.RouteClass, bool)
	fs       *pflag.FlagSet
}

// combinedWindow is how far Apache's lines are commonly out of order: it writes
// the start of a request when it ends.
const combinedWindow = 2 * time.Minute

func (f *logFlags) register(fs *pflag.FlagSet) {
	f.window, f.unit = durationFlag(10*time.Second), durationFlag(time.Second)
	fs.StringVar(&f.format, "format", "auto", "records (of agents), combined (Apache, nginx), jsonl, csv; auto looks at the file")
	fs.StringVar(&f.columns.Time, "time-column", "", "`column` of the time (csv, jsonl; nested members with dots)")
	fs.StringVar(&f.timeForm, "time-form", "any", "any, rfc3339, datetime, combined, unix, unix-ms, unix-us or unix-ns")
	fs.StringVar(&f.columns.Tenant, "tenant-column", "", "`column` of the tenant; combined logs have client, user and more")
	fs.StringVar(&f.tenant, "tenant", "", "the one tenant of all lines, instead of a column")
	fs.StringSliceVar(&f.cost, "cost-columns", nil, "`columns` whose sum is the cost")
	fs.StringVar(&f.columns.Class, "class-column", "", "`column` of the route class")
	fs.StringVar(&f.class, "class", "", "the one route class of all lines")
	fs.StringArrayVar(&f.routes, "route", nil, "`PATTERN=CLASS` maps method and path as ServeMux does, e.g. 'GET /images/=asset'; repeat it")
	fs.StringVar(&f.columns.Method, "method-column", "", "`column` of the method, for --route")
	fs.StringVar(&f.columns.Path, "path-column", "", "`column` of the path, for --route")
	fs.StringVar(&f.columns.Status, "status-column", "", "`column` of the HTTP status: 429 and 503 were not admitted")
	fs.StringVar(&f.columns.Duration, "duration-column", "", "`column` of the duration, taken off the time because the log has the end of requests")
	fs.Var(&f.unit, "duration-unit", "unit of that column")
	fs.Var(&f.window, "window", "lines may be out of order by this much; they are sorted (combined logs: 2m)")
	f.fs = fs
	fs.StringVar(&f.comma, "comma", ",", "separator of csv, one character")
	fs.Int64Var(&f.skipBad, "skip-bad", 0, "malformed lines that are left out, and counted, before one is an error")
}

func (f *logFlags) options(name string) (trace.Options, error) {
	o := trace.Options{File: name, Columns: f.columns, Window: time.Duration(f.window), SkipBad: f.skipBad}
	form, err := trace.ParseTimeForm(f.timeForm)
	if err != nil {
		return o, fmt.Errorf("--time-form: %q; allowed are any, rfc3339, datetime, combined, unix, unix-ms, unix-us and unix-ns", f.timeForm)
	}
	if len(f.comma) != 1 {
		return o, fmt.Errorf("--comma: %q; allowed is one character", f.comma)
	}
	if len(f.routes) > 0 && f.compiled == nil {
		if f.compiled, err = compileRoutes(f.routes); err != nil {
			return o, err
		}
	}
	o.Class = f.compiled
	o.Comma = f.comma[0]
	o.Columns.TimeForm, o.Columns.DurationUnit = form, time.Duration(f.unit)
	o.Columns.Cost = f.cost
	o.Columns.TenantIs, o.Columns.ClassIs = grant.TenantID(f.tenant), grant.RouteClass(f.class)
	return o, nil
}

// missing names the flags that a format needs, before a file is opened.
func (f *logFlags) missing(kind trace.Kind) error {
	if kind != trace.CSV && kind != trace.JSONLines {
		return nil
	}
	if f.columns.Time == "" {
		return fmt.Errorf("a %v file needs --time-column: the name of the column with the time", kind)
	}
	if f.columns.Tenant == "" && f.tenant == "" {
		return fmt.Errorf("a %v file needs --tenant-column NAME, or --tenant NAME when all lines are of one tenant", kind)
	}
	return nil
}

// open opens a file, - for standard input, through gzip if it is compressed.
func (f *logFlags) open(name string, stdin io.Reader) (*trace.Reader, error) {
	var in io.Reader = stdin
	shown := "standard input"
	if name != "-" {
		shown = name
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		if info, err := file.Stat(); err == nil && info.IsDir() {
			file.Close()
			return nil, fmt.Errorf("%s is a folder; name its files: %s", name, filepath.Join(name, "*"))
		}
		in = file // open until the process ends
	}
	b := bufio.NewReaderSize(in, 64<<10)
	if magic, _ := b.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", shown, err)
		}
		b = bufio.NewReaderSize(z, 64<<10)
		name = strings.TrimSuffix(name, ".gz")
	}
	kind, err := f.kindOf(name, shown, b)
	if err != nil {
		return nil, err
	}
	if err := f.missing(kind); err != nil {
		return nil, fmt.Errorf("%s: %w", shown, err)
	}
	o, err := f.options(shown)
	if err != nil {
		return nil, err
	}
	f.kind = kind
	if kind == trace.Combined && !f.fs.Changed("window") {
		o.Window = combinedWindow
	}
	r, err := trace.Open(kind, b, o)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// kindOf is the format named, or the one that the beginning looks like.
func (f *logFlags) kindOf(name, shown string, b *bufio.Reader) (trace.Kind, error) {
	switch f.format {
	case "records":
		return trace.Admissions, nil
	case "auto":
	default:
		kind, err := trace.ParseKind(f.format)
		if err != nil {
			return 0, fmt.Errorf("--format: %q; allowed are auto, records, combined, jsonl and csv", f.format)
		}
		return kind, nil
	}
	head, err := b.Peek(4 << 10)
	if len(head) == 0 && err != nil && !errors.Is(err, io.EOF) {
		return 0, fmt.Errorf("%s: %w", shown, err)
	}
	first, _, _ := bytes.Cut(head, []byte("\n"))
	switch ext := filepath.Ext(name); {
	case len(head) == 0:
		return 0, fmt.Errorf("%s is empty; is it the right file?", shown)
	case bytes.HasPrefix(first, []byte("#stipend-admissions ")):
		return trace.Admissions, nil
	case bytes.HasPrefix(first, []byte("{")) || ext == ".jsonl" || ext == ".ndjson":
		return trace.JSONLines, nil
	case bytes.Contains(first, []byte(" [")) && bytes.Contains(first, []byte("] \"")):
		return trace.Combined, nil
	case ext == ".csv" || bytes.Contains(first, []byte(f.comma)) && f.columns.Time != "":
		return trace.CSV, nil
	}
	return 0, fmt.Errorf("%s: what it is cannot be told from its first line; say --format records, combined, jsonl or csv", shown)
}

// class carries a route class through a ServeMux; it is never served.
type class grant.RouteClass

func (class) ServeHTTP(http.ResponseWriter, *http.Request) {}

// compileRoutes makes a mapping that matches as the agents' routes do.
func compileRoutes(routes []string) (match func(method, path string) (grant.RouteClass, bool), err error) {
	mux := http.NewServeMux()
	for _, r := range routes {
		i := strings.LastIndexByte(r, '=')
		if i <= 0 {
			return nil, fmt.Errorf("--route: %q; write PATTERN=CLASS, as in 'GET /images/=asset'", r)
		}
		pattern, name := r[:i], grant.RouteClass(r[i+1:])
		if err := name.Validate(); err != nil {
			return nil, fmt.Errorf("--route %q: %w", r, err)
		}
		if err := handle(mux, pattern, class(name)); err != nil {
			return nil, fmt.Errorf("--route %q: %w", r, err)
		}
	}
	return func(method, path string) (grant.RouteClass, bool) {
		if path == "" {
			return "", false
		}
		h, _ := mux.Handler(&http.Request{Method: method, URL: &url.URL{Path: path}})
		c, ok := h.(class)
		return grant.RouteClass(c), ok
	}, nil
}

// handle turns ServeMux's panic, its only way to refuse, into an error.
func handle(mux *http.ServeMux, pattern string, h http.Handler) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	mux.Handle(pattern, h)
	return nil
}
