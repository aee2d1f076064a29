package conf

import (
	"bytes"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// redacted stands in the place of a secret that is set.
const redacted = "(redacted)"

// YAML renders the struct that cfg points to, for --print-config: every field,
// in order, in the form that Load reads, secrets redacted.
func YAML(cfg any) []byte {
	return render(node(structOf(cfg), options{}))
}

func render(n *yaml.Node) []byte {
	var b bytes.Buffer
	encoder := yaml.NewEncoder(&b)
	encoder.SetIndent(2)
	if err := encoder.Encode(n); err != nil {
		panic("conf: render: " + err.Error()) // a buffer takes everything
	}
	encoder.Close()
	return b.Bytes()
}

func node(v reflect.Value, o options) *yaml.Node {
	t := v.Type()
	switch {
	case o.secret:
		if v.IsZero() {
			return word("!!str", "")
		}
		return word("!!str", redacted)
	case t.Kind() == reflect.Pointer:
		return node(v.Elem(), o)
	case single(t):
		return word(tagOf(t, text(v, o)), text(v, o))
	case t.Kind() == reflect.Struct:
		m := &yaml.Node{Kind: yaml.MappingNode}
		for _, f := range fieldsOf(t) {
			inner := v.FieldByIndex(f.index)
			if inner.Kind() == reflect.Pointer && inner.IsNil() {
				continue
			}
			add(m, f.name, node(inner, f.options))
		}
		return m
	case t.Kind() == reflect.Map:
		m := &yaml.Node{Kind: yaml.MappingNode}
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			add(m, k.String(), node(v.MapIndex(k), o))
		}
		return m
	}
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for i := range v.Len() {
		list.Content = append(list.Content, node(v.Index(i), o))
	}
	return list
}

// tagOf makes the encoder quote text that would read as something else.
func tagOf(t reflect.Type, s string) string {
	switch {
	case t == durationType || t == rateType && s != "0":
		return "!!str"
	case t == rateType:
		return "!!int"
	}
	switch t.Kind() {
	case reflect.Bool:
		return "!!bool"
	case reflect.Float64:
		if strings.ContainsAny(s, ".e") {
			return "!!float"
		}
		return "!!int"
	case reflect.String:
		return "!!str"
	}
	if _, err := parseInt(s, -1<<63, 1<<63-1); err != nil || reflect.PointerTo(t).Implements(textType) {
		return "!!str" // a size, a word
	}
	return "!!int"
}

func word(tag, value string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}
}

func add(m *yaml.Node, key string, value *yaml.Node) {
	m.Content = append(m.Content, word("!!str", key), value)
}
