package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// format takes one line of an access log apart. The fields are those of the
// last line parsed.
type format interface {
	parse(line string) *fault
	// field is the value of a column; the fault says why there is none.
	field(name string) (string, *fault)
	// knows says before the first line whether the column can exist.
	knows(name string) *fault
}

// combined is the log format of Apache and nginx, with or without referer and
// agent, and with any fields after them.
type combined struct {
	values [len(combinedNames)]string
	extra  []string
}

var combinedNames = [...]string{"client", "ident", "user", "time", "request", "method", "target", "path", "protocol", "status", "bytes", "referer", "agent"}

const maxExtra = 32

func (c *combined) parse(line string) *fault {
	c.values, c.extra = [len(combinedNames)]string{}, c.extra[:0]
	set := func(name, value string) { c.values[slices.Index(combinedNames[:], name)] = value }

	client, rest, ok := strings.Cut(line, " ")
	if !ok || client == "" {
		return &fault{"client", short(line), "an address before the first space"}
	}
	ident, rest, ok := strings.Cut(rest, " ")
	if !ok {
		return &fault{"ident", short(rest), "client, ident, user, [time], \"request\", status and bytes"}
	}
	// A user name may hold spaces and brackets: the time is the first bracket
	// that holds one.
	const stamp = "02/Jan/2006:15:04:05 -0700"
	user, when := "", ""
	for from := 0; when == ""; {
		i := strings.Index(rest[from:], " [")
		if i < 0 {
			return &fault{"time", short(rest), "[" + stamp + "] after the user"}
		}
		i += from
		if end := i + 2 + len(stamp); end < len(rest) && rest[end] == ']' {
			if _, err := time.Parse(stamp, rest[i+2:end]); err == nil {
				user, when, rest = rest[:i], rest[i+2:end], rest[end+1:]
			}
		}
		from = i + 2
	}
	set("client", client)
	set("ident", ident)
	set("user", user)
	set("time", when)
	tokens, f := splitQuoted(rest)
	if f != nil {
		return f
	}
	if len(tokens) < 3 {
		return &fault{"request", short(rest), "\"request\", status and bytes after the time"}
	}
	set("request", tokens[0])
	set("status", tokens[1])
	set("bytes", tokens[2])
	// What is no HTTP request (a port scan, "-") has neither method nor path.
	if parts := strings.Split(tokens[0], " "); len(parts) == 3 && strings.HasPrefix(parts[2], "HTTP/") {
		path, _, _ := strings.Cut(parts[1], "?")
		set("method", parts[0])
		set("target", parts[1])
		set("path", path)
		set("protocol", parts[2])
	}
	for i, name := range []string{"referer", "agent"} {
		if len(tokens) > 3+i {
			set(name, tokens[3+i])
		}
	}
	if len(tokens) > 5 {
		c.extra = append(c.extra, tokens[5:]...)
	}
	return nil
}

// splitQuoted takes words and "quoted strings", in which a backslash guards
// the next character, as Apache and nginx write them.
func splitQuoted(s string) ([]string, *fault) {
	var out []string
	for s = strings.TrimLeft(s, " "); s != ""; s = strings.TrimLeft(s, " ") {
		if len(out) == 5+maxExtra {
			return nil, &fault{"line", short(s), fmt.Sprintf("at most %d fields after the time", 5+maxExtra)}
		}
		if s[0] != '"' {
			word, rest, _ := strings.Cut(s, " ")
			out, s = append(out, word), rest
			continue
		}
		i := 1
		for i < len(s) && s[i] != '"' {
			if s[i] == '\\' {
				i++
			}
			i++
		}
		if i >= len(s) {
			return nil, &fault{"request", short(s), "a closing quote"}
		}
		text := s[1:i]
		if strings.IndexByte(text, '\\') >= 0 {
			text = unescape(text)
		}
		out, s = append(out, text), s[i+1:]
	}
	return out, nil
}

// unescape resolves \" and \\; \xhh and the like stay as they are written.
func unescape(s string) string {
	return strings.NewReplacer(`\\`, `\`, `\"`, `"`).Replace(s)
}

func (c *combined) field(name string) (string, *fault) {
	if i := slices.Index(combinedNames[:], name); i >= 0 {
		v := c.values[i]
		if name == "bytes" && v == "-" { // nothing was sent
			v = "0"
		}
		return v, nil
	}
	n, err := strconv.Atoi(strings.TrimPrefix(name, "extra"))
	if err != nil || n < 1 || n > len(c.extra) {
		return "", &fault{name, fmt.Sprintf("the line has %d fields after the agent", len(c.extra)), "extra1 to the last of them"}
	}
	return c.extra[n-1], nil
}

func (c *combined) knows(name string) *fault {
	if slices.Contains(combinedNames[:], name) {
		return nil
	}
	if n, ok := strings.CutPrefix(name, "extra"); ok {
		if i, err := strconv.Atoi(n); err == nil && i >= 1 && i <= maxExtra {
			return nil
		}
	}
	return &fault{"column", short(name), strings.Join(combinedNames[:], ", ") + ", extra1 to extra" + strconv.Itoa(maxExtra)}
}

// csvLines is CSV whose first line names the columns; quoted fields end on
// their line.
type csvLines struct {
	comma   byte
	columns []string
	values  []string
}

func (c *csvLines) header(line string) *fault {
	names, f := splitCSV(line, c.comma, nil)
	if f != nil {
		return f
	}
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
		if slices.Contains(names[:i], names[i]) {
			return &fault{"header", "column " + short(name) + " twice", "different names"}
		}
	}
	c.columns = names
	return nil
}

func (c *csvLines) parse(line string) (f *fault) {
	if c.values, f = splitCSV(line, c.comma, c.values[:0]); f != nil {
		return f
	}
	if len(c.values) != len(c.columns) {
		return &fault{"line", fmt.Sprintf("%d fields", len(c.values)), fmt.Sprintf("%d, as the header has", len(c.columns))}
	}
	return nil
}

func splitCSV(line string, comma byte, out []string) ([]string, *fault) {
	for {
		if !strings.HasPrefix(line, `"`) {
			i := strings.IndexByte(line, comma)
			value := line
			if i >= 0 {
				value = line[:i]
			}
			if strings.IndexByte(value, '"') >= 0 {
				return nil, &fault{"line", "a quote inside the bare field " + short(value), "quotes around the whole field, doubled inside"}
			}
			out = append(out, value)
			if i < 0 {
				return out, nil
			}
			line = line[i+1:]
			continue
		}
		var value strings.Builder
		rest := line[1:]
		for {
			part, after, ok := strings.Cut(rest, `"`)
			if !ok {
				return nil, &fault{"line", "the quoted field " + short(line) + " does not end", "fields that end on their own line"}
			}
			value.WriteString(part)
			rest = after
			if !strings.HasPrefix(rest, `"`) {
				break
			}
			value.WriteByte('"')
			rest = rest[1:]
		}
		out = append(out, value.String())
		if rest == "" {
			return out, nil
		}
		if rest[0] != comma {
			return nil, &fault{"line", short(rest) + " after a quoted field", fmt.Sprintf("%q or the end of the line", comma)}
		}
		line = rest[1:]
	}
}

func (c *csvLines) field(name string) (string, *fault) {
	i := slices.Index(c.columns, name)
	if i < 0 || i >= len(c.values) {
		return "", c.knows(name)
	}
	return c.values[i], nil
}

func (c *csvLines) knows(name string) *fault {
	if slices.Contains(c.columns, name) {
		return nil
	}
	return &fault{"column", short(name), "one of the header's: " + short(strings.Join(c.columns, ", "))}
}

// jsonLines is one object a line. A column is a member by its name, or a path
// of names with dots.
type jsonLines struct{ object map[string]any }

func (j *jsonLines) parse(line string) *fault {
	const allowed = "one JSON object a line"
	j.object = nil
	d := json.NewDecoder(bytes.NewReader([]byte(line)))
	d.UseNumber()
	if err := d.Decode(&j.object); err != nil {
		return &fault{"line", short(line) + " (" + err.Error() + ")", allowed}
	}
	if _, err := d.Token(); err != io.EOF || j.object == nil {
		return &fault{"line", short(line), allowed}
	}
	return nil
}

func (j *jsonLines) field(name string) (string, *fault) {
	value, ok := j.object[name]
	if !ok {
		at := j.object
		parts := strings.Split(name, ".")
		for i, part := range parts {
			if value, ok = at[part]; !ok {
				break
			}
			if i < len(parts)-1 {
				if at, ok = value.(map[string]any); !ok {
					break
				}
			}
		}
	}
	if !ok {
		return "", &fault{name, "the object has no such member", "a line that has it"}
	}
	switch v := value.(type) {
	case string:
		return v, nil
	case json.Number:
		return v.String(), nil
	}
	return "", &fault{name, fmt.Sprintf("%.80v", value), "a string or a number"}
}

func (j *jsonLines) knows(string) *fault { return nil }
