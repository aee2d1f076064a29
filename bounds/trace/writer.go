package trace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// ErrLost means that a record was not written: the queue is full, or the
// writer failed or is closed. It is counted, and the file says so.
var ErrLost = errors.New("trace: the record is lost")

// MinBuffer is the least buffer of a Writer: room for the longest line.
const MinBuffer = 8 << 10

// WriterConfig holds the settings of a Writer.
type WriterConfig struct {
	Header Header
	// Buffer is how many bytes wait for the disk, MinBuffer to 1 GiB. As many
	// again are being written. 1 MiB holds some 10,000 records.
	Buffer int
	// Every is how often Run flushes: what a kill may lose. 1 ms to 1 h.
	Every time.Duration
}

// Validate names the first field out of range, the value given and what is allowed.
func (c WriterConfig) Validate() error {
	if f := c.Header.validate(); f != nil {
		return fmt.Errorf("trace: header: %w", f)
	}
	if c.Buffer < MinBuffer || c.Buffer > 1<<30 {
		return fmt.Errorf("trace: buffer: %d bytes; allowed: %d to %d", c.Buffer, MinBuffer, 1<<30)
	}
	if c.Every < time.Millisecond || c.Every > time.Hour {
		return fmt.Errorf("trace: every: %v; allowed: 1ms to 1h", c.Every)
	}
	return nil
}

// Writer writes records of admissions. Append never waits for the disk: it adds
// a line to a bounded buffer, and a full buffer loses the line and says so in
// the file. Run, or whoever calls Flush, writes. All methods are safe for
// concurrent use. It writes a whole file of its own: an appended file may end
// in a line that was cut.
type Writer struct {
	cfg  WriterConfig
	wake chan struct{} // the buffer is half full

	mu       sync.Mutex
	buf      []byte
	lines    uint64 // in the file or buf
	buffered uint64 // in buf
	lost     uint64
	pending  uint64 // lost and not yet said in the file
	closed   bool
	err      error

	writing sync.Mutex // held before mu; one write at a time
	w       io.Writer
	spare   []byte
}

// NewWriter buffers the header; nothing is written before the first Flush.
func NewWriter(w io.Writer, cfg WriterConfig) (*Writer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Writer{
		cfg: cfg, w: w, wake: make(chan struct{}, 1),
		buf: appendHeader(make([]byte, 0, cfg.Buffer), cfg.Header), spare: make([]byte, 0, cfg.Buffer),
	}, nil
}

// Append adds a record. The error is ErrLost, or says which field cannot be
// recorded; either way the record counts as lost.
func (w *Writer) Append(r Record) error {
	bad := r.validate()
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case bad != nil:
		w.lose(1)
		return fmt.Errorf("trace: record: %w", bad)
	case w.closed || w.err != nil:
		w.lose(1)
		return ErrLost
	}
	before := len(w.buf)
	// A name is at most four times as long in quotes. The room for two more
	// lines is kept for those that say what was lost, and for the end.
	const rest, kept = 128, 128
	if before+rest+4*(len(r.Tenant)+len(r.Class)+len(r.Owner)) > w.cfg.Buffer-kept {
		w.lose(1)
		w.wakeUp()
		return ErrLost
	}
	if w.pending > 0 {
		w.buf = appendLost(w.buf, w.pending)
		w.pending = 0
	}
	w.buf = appendRecord(w.buf, &r)
	w.lines++
	w.buffered++
	if before <= w.cfg.Buffer/2 && len(w.buf) > w.cfg.Buffer/2 {
		w.wakeUp()
	}
	return nil
}

func (w *Writer) lose(n uint64) {
	w.lost += n
	w.pending += n
}

func (w *Writer) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Lost is how many records were not written so far.
func (w *Writer) Lost() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// Flush writes everything that was appended before the call. An error is final:
// the file may end anywhere, and what was not written before counts as lost, as
// does every later record.
func (w *Writer) Flush() error { return w.flush(false) }

// Close flushes, with the line that ends the file. It does not close the
// underlying writer, and does nothing the second time.
func (w *Writer) Close() error { return w.flush(true) }

func (w *Writer) flush(closing bool) error {
	w.writing.Lock()
	defer w.writing.Unlock()
	w.mu.Lock()
	if w.err != nil || w.closed {
		defer w.mu.Unlock()
		return w.err
	}
	if w.pending > 0 {
		w.buf = appendLost(w.buf, w.pending)
		w.pending = 0
	}
	if closing {
		w.buf = appendEnd(w.buf, w.lines, w.lost)
		w.closed = true
	}
	out, lines := w.buf, w.buffered
	w.buf, w.buffered = w.spare[:0], 0
	w.mu.Unlock()

	n, err := w.w.Write(out)
	if err == nil && n < len(out) {
		err = io.ErrShortWrite
	}
	w.spare = out[:0]
	if err != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.err = fmt.Errorf("trace: write: %w", err)
		w.lost += lines + w.buffered // how far the write came is not known
		w.buffered = 0
		return w.err
	}
	return nil
}

// Run flushes every Every, and when the buffer is half full, until the context
// ends; then it closes the file. It returns the first error of a write.
func (w *Writer) Run(ctx context.Context) error {
	tick := time.NewTicker(w.cfg.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return w.Close()
		case <-tick.C:
		case <-w.wake:
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
}
