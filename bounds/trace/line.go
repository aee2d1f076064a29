package trace

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/stipend/stipend/proto/grant"
)

const (
	magic   = "#stipend-admissions "
	version = "1"
)

// Header says who recorded and by which clock.
type Header struct {
	Recorder string // at most grant.MaxOwnerLen bytes
	Clock    string // at most grant.MaxOwnerLen bytes; times of different clocks are never compared
}

// Wall is the Clock of access logs: ns since 1970.
const Wall = "wall"

func (h Header) validate() *fault {
	for _, f := range [...]struct{ field, given string }{{"recorder", h.Recorder}, {"clock", h.Clock}} {
		if err := grant.Owner(f.given).Validate(); err != nil {
			return &fault{f.field, short(f.given), fmt.Sprintf("1 to %d bytes of UTF-8 without control characters", grant.MaxOwnerLen)}
		}
	}
	return nil
}

func appendHeader(b []byte, h Header) []byte {
	b = append(b, magic+version+" recorder="...)
	b = strconv.AppendQuote(b, h.Recorder)
	b = append(b, " clock="...)
	b = strconv.AppendQuote(b, h.Clock)
	return append(b, " unit=ns\n"...)
}

func appendRecord(b []byte, r *Record) []byte {
	b = strconv.AppendInt(b, int64(r.At), 10)
	b = append(b, ' ')
	b = strconv.AppendQuote(b, string(r.Tenant))
	b = append(b, ' ')
	b = strconv.AppendQuote(b, string(r.Class))
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(r.Cost), 10)
	b = append(b, ' ')
	b = strconv.AppendQuote(b, string(r.Owner))
	b = append(b, ' ')
	b = append(b, r.Path.String()...)
	b = append(b, ' ')
	b = append(b, r.Stage.String()...)
	return append(b, '\n')
}

func appendLost(b []byte, n uint64) []byte {
	b = append(b, "#lost "...)
	return append(strconv.AppendUint(b, n, 10), '\n')
}

func appendEnd(b []byte, lines, lost uint64) []byte {
	b = append(b, "#end lines="...)
	b = strconv.AppendUint(b, lines, 10)
	b = append(b, " lost="...)
	return append(strconv.AppendUint(b, lost, 10), '\n')
}

// cursor takes a line apart; the first fault stops it.
type cursor struct {
	rest string
	err  *fault
}

func (c *cursor) fail(field, given, allowed string) {
	if c.err == nil {
		c.err = &fault{field, given, allowed}
	}
}

// literal takes exactly the given text.
func (c *cursor) literal(text string) {
	if c.err != nil {
		return
	}
	rest, ok := strings.CutPrefix(c.rest, text)
	if !ok {
		c.fail("", short(c.rest), fmt.Sprintf("%q here", text))
		return
	}
	c.rest = rest
}

// word takes what stands before the next space, or the rest.
func (c *cursor) word() string {
	if c.err != nil {
		return ""
	}
	i := strings.IndexByte(c.rest, ' ')
	if i < 0 {
		i = len(c.rest)
	}
	w := c.rest[:i]
	c.rest = c.rest[i:]
	return w
}

func (c *cursor) quoted(field string) string {
	if c.err != nil {
		return ""
	}
	const allowed = "a Go string literal in double quotes"
	if !strings.HasPrefix(c.rest, `"`) {
		c.fail(field, short(c.rest), allowed)
		return ""
	}
	q, err := strconv.QuotedPrefix(c.rest)
	if err != nil {
		c.fail(field, short(c.rest), allowed)
		return ""
	}
	c.rest = c.rest[len(q):]
	s, err := strconv.Unquote(q)
	if err != nil {
		c.fail(field, short(q), allowed)
	}
	return s
}

func (c *cursor) integer(field string, low int64) int64 {
	w := c.word()
	if c.err != nil {
		return 0
	}
	n, err := strconv.ParseInt(w, 10, 64)
	if err != nil || n < low {
		c.fail(field, short(w), fmt.Sprintf("a whole number from %d to %d", low, int64(math.MaxInt64)))
	}
	return n
}

func (c *cursor) name(field string, names []string) int {
	w := c.word()
	if c.err != nil {
		return 0
	}
	i, ok := indexOf(names, w)
	if !ok {
		c.fail(field, short(w), strings.Join(names, ", "))
	}
	return i
}

func (c *cursor) end() {
	if c.err == nil && c.rest != "" {
		c.fail("", short(c.rest), "the end of the line here")
	}
}

func parseHeader(line string) (Header, *fault) {
	c := cursor{rest: line}
	if !strings.HasPrefix(line, magic) {
		return Header{}, &fault{"header", short(line), "a first line that begins with " + magic + version}
	}
	c.literal(magic)
	if v := c.word(); v != version {
		return Header{}, &fault{"version", short(v), version + "; use a newer program for newer files"}
	}
	var h Header
	c.literal(" recorder=")
	h.Recorder = c.quoted("recorder")
	c.literal(" clock=")
	h.Clock = c.quoted("clock")
	c.literal(" unit=ns")
	c.end()
	if c.err != nil {
		return Header{}, c.err
	}
	return h, h.validate()
}

func parseRecord(line string) (Record, *fault) {
	c := cursor{rest: line}
	var r Record
	r.At = grant.Instant(c.integer("time", math.MinInt64))
	c.literal(" ")
	r.Tenant = grant.TenantID(c.quoted("tenant"))
	c.literal(" ")
	r.Class = grant.RouteClass(c.quoted("class"))
	c.literal(" ")
	r.Cost = grant.Units(c.integer("cost", 0))
	c.literal(" ")
	r.Owner = grant.Owner(c.quoted("owner"))
	c.literal(" ")
	r.Path = Path(c.name("path", pathNames))
	c.literal(" ")
	r.Stage = Stage(c.name("stage", stageNames))
	c.end()
	if c.err != nil {
		return Record{}, c.err
	}
	return r, r.validate()
}

func parseLost(line string) (uint64, *fault) {
	c := cursor{rest: line}
	c.literal("#lost ")
	n := c.integer("lost", 1)
	c.end()
	return uint64(n), c.err
}

func parseEnd(line string) (lines, lost uint64, err *fault) {
	c := cursor{rest: line}
	c.literal("#end lines=")
	lines = uint64(c.integer("lines", 0))
	c.literal(" lost=")
	lost = uint64(c.integer("lost", 0))
	c.end()
	return lines, lost, c.err
}
