package conf

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// options are the words of a field's conf tag.
type options struct {
	bytes, unlimited, secret, scalar bool
}

// field is one named field of a struct.
type field struct {
	name  string
	index []int
	help  string
	options
}

// fieldsOf lists the fields with a yaml name, those of embedded structs among
// them. Fields without a yaml tag, or with "-", are not configuration.
func fieldsOf(t reflect.Type) []field {
	var out []field
	for i := range t.NumField() {
		f := t.Field(i)
		name, rest, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if rest == "inline" || f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct {
			for _, inner := range fieldsOf(f.Type) {
				inner.index = append([]int{i}, inner.index...)
				out = append(out, inner)
			}
			continue
		}
		if name == "" || name == "-" || !f.IsExported() {
			continue
		}
		one := field{name: name, index: []int{i}, help: f.Tag.Get("help")}
		for word := range strings.SplitSeq(f.Tag.Get("conf"), ",") {
			switch word {
			case "":
			case "bytes":
				one.bytes = true
			case "unlimited":
				one.unlimited = true
			case "secret":
				one.secret = true
			case "scalar":
				one.scalar = true
			default:
				panic(fmt.Sprintf("conf: %v.%s: unknown word %q in its tag", t, f.Name, word))
			}
		}
		out = append(out, one)
	}
	return out
}

// fields is fieldsOf, remembered: a file may hold 100,000 tenants.
func (r *reader) fields(t reflect.Type) []field {
	known, ok := r.types[t]
	if !ok {
		known = fieldsOf(t)
		r.types[t] = known
	}
	return known
}

// decode sets v from the node; faults are collected, and what is faulty keeps
// the value it had.
func (r *reader) decode(n *yaml.Node, v reflect.Value, path string, o options) {
	r.at[path] = r.position(n)
	if !r.plain(n, path) {
		return
	}
	t := v.Type()
	switch {
	case t.Kind() == reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(t.Elem()))
		}
		r.decode(n, v.Elem(), path, o)
	case single(t):
		r.decodeScalar(n, v, path, o)
	case t.Kind() == reflect.Struct:
		r.decodeStruct(n, v, path)
	case t.Kind() == reflect.Map:
		r.decodeMap(n, v, path, o)
	case t.Kind() == reflect.Slice:
		r.decodeSlice(n, v, path, o)
	default:
		panic(fmt.Sprintf("conf: %s: a %v cannot be configured", path, t))
	}
}

func (r *reader) decodeScalar(n *yaml.Node, v reflect.Value, path string, o options) {
	if n.Kind != yaml.ScalarNode {
		r.fault(r.position(n), path, "is "+describe(n), "write one value")
		return
	}
	if n.ShortTag() == "!!bool" && v.Kind() == reflect.String {
		r.fault(r.position(n), path, n.Value+" is not text", fmt.Sprintf("write %q in quotes if the word is meant", n.Value))
		return
	}
	if quoted := n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0; quoted && (v.CanInt() || v.CanUint() || v.CanFloat() || v.Kind() == reflect.Bool) &&
		(isNumber(n.Value) || v.Kind() == reflect.Bool) {
		r.fault(r.position(n), path, quote(n.Value)+" is text", "remove the quotes")
		return
	}
	old := reflect.New(v.Type()).Elem()
	old.Set(v)
	if err := setText(v, n.Value, o); err != nil {
		v.Set(old)
		r.textFault(r.position(n), path, err)
	}
}

func (r *reader) textFault(at Position, path string, err error) {
	var f *fault
	if errors.As(err, &f) {
		r.fault(at, path, f.what, f.do)
		return
	}
	r.fault(at, path, err.Error(), "")
}

func (r *reader) decodeStruct(n *yaml.Node, v reflect.Value, path string) {
	fields := r.fields(v.Type())
	if n.Kind == yaml.ScalarNode {
		for _, f := range fields {
			if f.scalar {
				r.decode(n, v.FieldByIndex(f.index), path, f.options)
				return
			}
		}
	}
	r.pairs(n, path, func(key, value *yaml.Node) {
		for _, f := range fields {
			if f.name == key.Value {
				r.decode(value, v.FieldByIndex(f.index), join(path, f.name), f.options)
				return
			}
		}
		var names []string
		for _, f := range fields {
			names = append(names, f.name)
		}
		r.unknown(r.position(key), join(path, quoteKey(key.Value)), "is no known key", key.Value, names)
	})
}

// quoteKey keeps a stranger's key readable within a path.
func quoteKey(s string) string {
	if q := quote(s); len(q) != len(s)+2 || s == "" {
		return q
	}
	return s
}

func (r *reader) decodeMap(n *yaml.Node, v reflect.Value, path string, o options) {
	t := v.Type()
	if t.Key().Kind() != reflect.String {
		panic(fmt.Sprintf("conf: %s: the keys of a %v are not text", path, t))
	}
	if v.IsNil() {
		v.Set(reflect.MakeMap(t))
	}
	r.pairs(n, path, func(key, value *yaml.Node) {
		k := reflect.New(t.Key()).Elem()
		k.SetString(key.Value)
		element := reflect.New(t.Elem()).Elem()
		r.decode(value, element, join(path, quoteKey(key.Value)), o)
		// An empty value stands at its key for what is said about it later.
		v.SetMapIndex(k, element)
	})
}

func (r *reader) decodeSlice(n *yaml.Node, v reflect.Value, path string, o options) {
	if n.Kind != yaml.SequenceNode {
		r.fault(r.position(n), path, "is "+describe(n), "write it as a list")
		return
	}
	list := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, one := range n.Content {
		r.decode(one, list.Index(i), fmt.Sprintf("%s.%d", path, i), o)
	}
	v.Set(list)
}
