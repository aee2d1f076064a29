package conf

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxFile bounds a file in bytes: 200,000 tenants with overrides fit.
const maxFile = 64 << 20

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if len(raw) > maxFile {
		return nil, Problems{{At: Position{Source: path}, What: fmt.Sprintf("has more than %d bytes", maxFile), Do: "is it the right file?"}}
	}
	return raw, nil
}

var yamlLine = regexp.MustCompile(`^(?:yaml: )?(?:line (\d+): )?(.*)$`)

// lateLines begin the messages for which the library counts lines from 0; it
// leaves line 0 out altogether, as it does for the messages that scanner fits.
var lateLines = []string{
	"did not find expected ',' or", "did not find expected key", "did not find expected '-' indicator",
	"did not find expected node content", "did not find expected <",
}

var scanner = regexp.MustCompile(`^(found |did not find |could not find |mapping values |block )`)

// parse reads the one document of a file; nil when it holds nothing.
func parse(file string, raw []byte) (*yaml.Node, error) {
	fault := func(err error) error {
		m := yamlLine.FindStringSubmatch(strings.SplitN(err.Error(), "\n", 2)[0])
		line, _ := strconv.Atoi(m[1])
		for _, one := range lateLines {
			if strings.HasPrefix(m[2], one) {
				line++
			}
		}
		if line == 0 && scanner.MatchString(m[2]) {
			line = 1
		}
		return Problems{{At: Position{Source: file, Line: line}, What: m[2], Do: "this is not YAML; is the file complete, and indented with spaces?"}}
	}
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	var doc yaml.Node
	if err := decoder.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		return nil, fault(err)
	}
	var second yaml.Node
	if err := decoder.Decode(&second); err == nil {
		return nil, Problems{{
			At:   Position{Source: file, Line: second.Line, Col: second.Column},
			What: "a second document begins here", Do: "keep one document in a file, and remove the --- line",
		}}
	} else if !errors.Is(err, io.EOF) {
		return nil, fault(err)
	}
	if len(doc.Content) != 1 {
		return nil, nil
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null" && root.Value == "" {
		return nil, nil // comments only
	}
	return root, nil
}

// reader turns nodes into values and collects the faults.
type reader struct {
	file   string
	at     map[string]Position // of every value that was written, by path
	faults Problems
	types  map[reflect.Type][]field
}

func newReader(file string) *reader {
	return &reader{file: file, at: map[string]Position{}, types: map[reflect.Type][]field{}}
}

func (r *reader) position(n *yaml.Node) Position {
	return Position{Source: r.file, Line: n.Line, Col: n.Column}
}

func (r *reader) fault(at Position, path, what, do string) {
	r.faults = append(r.faults, Problem{At: at, Path: path, What: what, Do: do})
}

// unknown reports a name that is none of names.
func (r *reader) unknown(at Position, path, what, given string, names []string) {
	r.faults = append(r.faults, Problem{At: at, Path: path, What: what, Do: suggestion(given, names), unknown: true})
}

// nearestAt is the position of the path, or of the closest value around it
// that was written.
func (r *reader) nearestAt(path string) Position {
	for {
		if at, ok := r.at[path]; ok {
			return at
		}
		if path == "" {
			return Position{Source: r.file}
		}
		path = path[:max(0, strings.LastIndexByte(path, '.'))]
	}
}

// plain tests what holds for every node: no anchors, aliases or explicit tags,
// which let a line mean something that is written elsewhere, and a value.
func (r *reader) plain(n *yaml.Node, path string) bool {
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		r.fault(r.position(n), path, "uses an anchor or alias", "write the value out; tenants share values through plans")
	case n.Style&yaml.TaggedStyle != 0:
		r.fault(r.position(n), path, "has the explicit tag "+n.Tag, "remove the tag")
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null":
		r.fault(r.position(n), path, "has no value", "give one or remove the key")
	default:
		return true
	}
	return false
}

// pairs yields the keys and values of a mapping; a repeated key is a fault and
// left out. It returns false when the node is no mapping.
func (r *reader) pairs(n *yaml.Node, path string, yield func(key, value *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode {
		r.fault(r.position(n), path, "is "+describe(n), "write it as keys and values")
		return false
	}
	first := make(map[string]int, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode || key.Style&yaml.TaggedStyle != 0 || key.Anchor != "" || key.ShortTag() == "!!merge" {
			r.fault(r.position(key), path, "has a key that is no plain word", "write keys as words; << is not supported")
			continue
		}
		if line, twice := first[key.Value]; twice {
			r.fault(r.position(key), join(path, key.Value), fmt.Sprintf("appears twice, first in line %d", line), "remove one of them")
			continue
		}
		first[key.Value] = key.Line
		yield(key, value)
	}
	return true
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	return "the single value " + quote(n.Value)
}

// quote keeps errors short and on one line.
func quote(s string) string {
	if len(s) > 60 {
		s = strings.ToValidUTF8(s[:57], "") + "..."
	}
	return strconv.Quote(s)
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
