package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// Stats counts what a Reader met so far.
type Stats struct {
	Lines    int64  // read, blank ones included
	Records  uint64 // yielded or held back
	Refused  uint64 // not admitted, by their status
	Unmapped uint64 // left out by Options.Class or Price
	Bad      int64  // malformed and left out
	FirstBad error  // the first of them

	// Of Admissions only: records that the writer says it lost; whether every
	// part of the file was ended by its writer; whether its last line was cut.
	Lost     uint64
	Complete bool
	Torn     bool
}

// Reader yields the records of one input in order of time. It is not safe for
// concurrent use.
type Reader struct {
	kind   Kind
	opts   Options
	in     *bufio.Reader
	format format // nil for Admissions
	header Header
	stats  Stats
	// sinceHeader counts records, lost those said lost, for the check at the end line.
	sinceHeader, sinceLost uint64
	ended                  bool // after an end line: a header, or nothing
	unended                bool // some part was not

	held       held
	newest     grant.Instant
	last       Record // the newest one, for errors
	any        bool
	resolution time.Duration
	eof        bool
	err        error

	closers []io.Closer
}

// Open reads far enough to know header and resolution. Its errors and those
// of Records that concern the input are *Error.
func Open(kind Kind, in io.Reader, opts Options) (*Reader, error) {
	if err := opts.complete(kind); err != nil {
		return nil, err
	}
	r := &Reader{kind: kind, opts: opts, in: bufio.NewReaderSize(in, opts.MaxLine+2), header: Header{Recorder: opts.File, Clock: Wall}}
	if bom, _ := r.in.Peek(3); bytes.Equal(bom, []byte("\xef\xbb\xbf")) {
		r.in.Discard(3)
	}
	switch kind {
	case Combined:
		r.format = new(combined)
	case JSONLines:
		r.format = new(jsonLines)
	case CSV:
		c := &csvLines{comma: opts.Comma}
		r.format = c
		line, _, err := r.line()
		if err == io.EOF {
			return nil, r.at(0, &fault{"header", "nothing", "a first line that names the columns"})
		} else if err != nil {
			return nil, err
		}
		if f := c.header(line); f != nil {
			return nil, r.at(r.stats.Lines, f)
		}
	case Admissions:
		r.resolution = 1
		if err := r.readHeader(); err != nil {
			return nil, err
		}
		return r, nil
	}
	for _, name := range opts.Columns.names(opts.Class != nil) {
		if f := r.format.knows(name); f != nil {
			return nil, r.at(min(r.stats.Lines, 1), f)
		}
	}
	if err := r.fill(); err != nil && err != io.EOF {
		return nil, err
	}
	if opts.Resolution > 0 {
		r.resolution = opts.Resolution
	}
	return r, nil
}

// OpenFile opens a file, through gzip if its name ends in .gz. An empty
// Options.File becomes the path. The caller closes the Reader.
func OpenFile(kind Kind, path string, opts Options) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	closers := []io.Closer{f}
	var in io.Reader = f
	if strings.HasSuffix(path, ".gz") {
		z, err := gzip.NewReader(f)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("trace: %s: %w", path, err), f.Close())
		}
		in, closers = z, []io.Closer{z, f}
	}
	if opts.File == "" {
		opts.File = path
	}
	r, err := Open(kind, in, opts)
	if err != nil {
		for _, c := range closers {
			err = errors.Join(err, c.Close())
		}
		return nil, err
	}
	r.closers = closers
	return r, nil
}

// Close closes what OpenFile opened.
func (r *Reader) Close() error {
	var err error
	for _, c := range r.closers {
		err = errors.Join(err, c.Close())
	}
	r.closers = nil
	return err
}

// Header is that of the file; of an access log it names the file and Wall.
func (r *Reader) Header() Header { return r.header }

// Resolution is by how much less than the truth a time may say: what
// bounds.Config.Skew must contain beside the skew of the clocks. It is as the
// first record is written, unless Options.Resolution says it; 0 for an access
// log without records.
func (r *Reader) Resolution() time.Duration { return r.resolution }

// Stats may be asked at any time.
func (r *Reader) Stats() Stats { return r.stats }

// Records yields the records in order of time, and at most one error, last.
// A loop that was left may be continued by another one.
func (r *Reader) Records() iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		for {
			rec, err := r.next()
			if err == io.EOF {
				return
			}
			if !yield(rec, err) || err != nil {
				return
			}
		}
	}
}

// next is the oldest record that no later line can precede; io.EOF after all.
func (r *Reader) next() (Record, error) {
	for r.err == nil {
		if len(r.held) > 0 && (r.eof || r.held[0].At <= r.newest.Add(-r.opts.Window)) {
			return heap.Pop(&r.held).(Record), nil
		}
		if r.eof {
			return Record{}, io.EOF
		}
		if err := r.fill(); err != nil && err != io.EOF {
			return Record{}, err
		}
	}
	return Record{}, r.err
}

// fill reads up to the next record and holds it. Every error but io.EOF is final.
func (r *Reader) fill() error {
	rec, err := r.read()
	switch {
	case err == io.EOF:
		r.eof = true
		return err
	case err != nil:
		r.err = err
		return err
	}
	if r.any && rec.At < r.newest.Add(-r.opts.Window) {
		r.err = r.at(rec.Line, &fault{"time", fmt.Sprintf("%s, %v older than %s in line %d",
			r.clock(rec.At), r.newest.Sub(rec.At), r.clock(r.newest), r.last.Line),
			fmt.Sprintf("records at most the window of %v older than one before them; widen the window or sort the file", r.opts.Window)})
		return r.err
	}
	if len(r.held) >= r.opts.MaxHeld {
		r.err = r.at(rec.Line, &fault{"time", fmt.Sprintf("more than %d records within the window of %v", r.opts.MaxHeld, r.opts.Window),
			"a narrower window, or more records held"})
		return r.err
	}
	if !r.any || rec.At > r.newest {
		r.any, r.newest, r.last = true, rec.At, rec
	}
	rec.File = r.opts.File
	r.stats.Records++
	heap.Push(&r.held, rec)
	return nil
}

// clock writes an instant for people.
func (r *Reader) clock(i grant.Instant) string {
	if r.header.Clock == Wall {
		return time.Unix(0, int64(i)).UTC().Format(time.RFC3339Nano)
	}
	return strconv.FormatInt(int64(i), 10) + " ns"
}

func (r *Reader) at(line int64, f *fault) *Error {
	return &Error{File: r.opts.File, Line: line, Field: f.field, Given: f.given, Allowed: f.allowed}
}

// line is the next line without its end; whole is false if the input ended
// before the line did.
func (r *Reader) line() (text string, whole bool, err error) {
	b, err := r.in.ReadSlice('\n')
	switch {
	case err == io.EOF && len(b) == 0:
		return "", false, io.EOF
	case err == bufio.ErrBufferFull || len(bytes.TrimRight(b, "\r\n")) > r.opts.MaxLine:
		r.stats.Lines++
		return "", false, r.at(r.stats.Lines, &fault{"line", short(string(b[:min(len(b), 40)])), fmt.Sprintf("at most %d bytes", r.opts.MaxLine)})
	case err != nil && err != io.EOF:
		return "", false, fmt.Errorf("trace: %s: read after line %d: %w", r.opts.File, r.stats.Lines, err)
	}
	r.stats.Lines++
	whole = err == nil
	if whole {
		b = b[:len(b)-1]
	}
	if n := len(b); n > 0 && b[n-1] == '\r' && r.kind != Admissions {
		b = b[:n-1]
	}
	return string(b), whole, nil
}

func (r *Reader) read() (Record, error) {
	if r.kind == Admissions {
		return r.readAdmission()
	}
	for {
		line, _, err := r.line()
		if err != nil {
			return Record{}, err
		}
		if strings.TrimSpace(line) == "" {
			continue
		}
		rec, counts, f := r.access(line)
		if f != nil {
			err := r.at(r.stats.Lines, f)
			if r.stats.Bad >= r.opts.SkipBad {
				return Record{}, err
			}
			if r.stats.Bad == 0 {
				r.stats.FirstBad = err
			}
			r.stats.Bad++
			continue
		}
		if counts {
			rec.Line = r.stats.Lines
			return rec, nil
		}
	}
}

func (r *Reader) readHeader() error {
	line, whole, err := r.line()
	if err == io.EOF {
		return r.at(0, &fault{"header", "nothing", "a first line that begins with " + magic + version})
	} else if err != nil {
		return err
	}
	if !whole {
		return r.at(1, &fault{"header", short(line) + " without a newline", "a whole first line"})
	}
	h, f := parseHeader(line)
	if f != nil {
		return r.at(r.stats.Lines, f)
	}
	r.header = h
	return nil
}

func (r *Reader) readAdmission() (Record, error) {
	for {
		line, whole, err := r.line()
		if err == io.EOF {
			r.stats.Complete = r.ended && !r.unended
			return Record{}, err
		} else if err != nil {
			return Record{}, err
		}
		if !whole {
			r.stats.Torn = true
			continue
		}
		var f *fault
		switch {
		case strings.HasPrefix(line, magic):
			var h Header
			if h, f = parseHeader(line); f == nil && h.Clock != r.header.Clock {
				f = &fault{"clock", short(h.Clock), "the clock of the first header, " + short(r.header.Clock)}
			}
			r.unended = r.unended || !r.ended
			r.sinceHeader, r.sinceLost, r.ended = 0, 0, false
		case r.ended:
			f = &fault{"line", short(line), "nothing but another header after the line that ends a file"}
		case strings.HasPrefix(line, "#lost "):
			var n uint64
			n, f = parseLost(line)
			r.stats.Lost += n
			r.sinceLost += n
		case strings.HasPrefix(line, "#end "):
			f = r.end(line)
		default:
			var rec Record
			if rec, f = parseRecord(line); f == nil {
				r.sinceHeader++
				rec.Line = r.stats.Lines
				return rec, nil
			}
		}
		if f != nil {
			return Record{}, r.at(r.stats.Lines, f)
		}
	}
}

// end compares the end line with what was read: a file that lost lines must
// not pass for whole.
func (r *Reader) end(line string) *fault {
	lines, lost, f := parseEnd(line)
	if f != nil {
		return f
	}
	if lines != r.sinceHeader || lost != r.sinceLost {
		return &fault{"end", fmt.Sprintf("%d records and %d lost, where %d and %d were read", lines, lost, r.sinceHeader, r.sinceLost), "a file as its writer left it"}
	}
	r.ended = true
	return nil
}

// held is a heap of records in order of time, then of line.
type held []Record

func (h held) Len() int { return len(h) }
func (h held) Less(i, j int) bool {
	if h[i].At != h[j].At {
		return h[i].At < h[j].At
	}
	return h[i].Line < h[j].Line
}
func (h held) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *held) Push(x any)   { *h = append(*h, x.(Record)) }
func (h *held) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
