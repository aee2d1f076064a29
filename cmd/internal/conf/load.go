package conf

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/stipend/stipend/proto/grant"
)

// envPrefix begins the names of all variables. Those that name no field are
// ignored: Kubernetes sets some of its own for a service called stipend.
const envPrefix = "STIPEND_"

// Sources are what overrides the file.
type Sources struct {
	Env   []string          // as os.Environ gives it
	Flags map[string]string // values of the flags that were given, by Field.Flag
}

// Field is one field that a variable or a flag may set: a single value or a
// list of them, not within a map or a list.
type Field struct {
	Path    string // "store.path"
	Flag    string // "store-path", to be written after --
	Env     string // "STIPEND_STORE_PATH"
	Help    string
	Default string
	Bool    bool // the flag may go without a value, which means true

	value reflect.Value
	options
}

// Fields lists the fields of the struct that cfg points to, in its order, for
// the registration of flags. It panics when two fields share a variable.
func Fields(cfg any) []Field {
	var out []Field
	taken := map[string]string{}
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		for _, f := range fieldsOf(v.Type()) {
			inner, at := v.FieldByIndex(f.index), join(path, f.name)
			if inner.Kind() == reflect.Struct && !single(inner.Type()) {
				walk(inner, at)
				continue
			}
			list := inner.Kind() == reflect.Slice && single(inner.Type().Elem())
			if !list && !single(inner.Type()) {
				continue
			}
			words := strings.NewReplacer(".", "_", "-", "_").Replace(at)
			one := Field{
				Path: at, Flag: strings.ReplaceAll(words, "_", "-"), Env: envPrefix + strings.ToUpper(words),
				Help: f.help, Bool: inner.Kind() == reflect.Bool, value: inner, options: f.options,
			}
			if other, twice := taken[one.Env]; twice {
				panic(fmt.Sprintf("conf: %s and %s share the variable %s", other, at, one.Env))
			}
			taken[one.Env] = at
			if !f.secret {
				one.Default = one.text()
			}
			out = append(out, one)
		}
	}
	walk(structOf(cfg), "")
	return out
}

func structOf(cfg any) reflect.Value {
	v := reflect.ValueOf(cfg)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		panic(fmt.Sprintf("conf: %T is no pointer to a struct", cfg))
	}
	return v.Elem()
}

func (f *Field) text() string {
	if f.value.Kind() != reflect.Slice || single(f.value.Type()) {
		return text(f.value, f.options)
	}
	parts := make([]string, f.value.Len())
	for i := range parts {
		parts[i] = text(f.value.Index(i), f.options)
	}
	return strings.Join(parts, ",")
}

func (f *Field) set(s string) error {
	t := f.value.Type()
	if single(t) {
		// Set only when all of it is sound: other faults are judged with the
		// value that was there before.
		fresh := reflect.New(t).Elem()
		if err := setText(fresh, s, f.options); err != nil {
			return err
		}
		f.value.Set(fresh)
		return nil
	}
	var parts []string
	if s != "" {
		parts = strings.Split(s, ",")
	}
	list := reflect.MakeSlice(t, len(parts), len(parts))
	for i, part := range parts {
		if err := setText(list.Index(i), strings.TrimSpace(part), f.options); err != nil {
			return err
		}
	}
	f.value.Set(list)
	return nil
}

// Load fills the struct that cfg points to: flags over environment over the
// file over what the struct holds already. An empty path is no file. Then it
// calls Validate of the struct and of every struct in it, inner ones first; a
// struct's Validate need not call those of its fields.
//
// Validate returns an error (several by errors.Join) or a []grant.Problem. An
// error "name: text", or a grant.Problem with that field, is reported where
// the field was written.
//
// The error is of type Problems, or says that the file could not be read. cfg
// is then half filled and of no use: keep the old one.
func Load(path string, cfg any, from Sources) error {
	var raw []byte
	if path != "" {
		var err error
		if raw, err = readFile(path); err != nil {
			return err
		}
	}
	return load(path, raw, cfg, from)
}

func load(path string, raw []byte, cfg any, from Sources) error {
	r := newReader(path)
	v := structOf(cfg)
	root, err := parse(path, raw)
	if err != nil {
		return err
	}
	if root != nil {
		r.decode(root, v, "", options{})
	}
	r.override(Fields(cfg), from)
	r.validate(v, "")
	return r.faults.errOrNil()
}

func (r *reader) override(fields []Field, from Sources) {
	env := map[string]string{}
	for _, pair := range from.Env {
		if name, value, ok := strings.Cut(pair, "="); ok && strings.HasPrefix(name, envPrefix) {
			env[name] = value
		}
	}
	unknown := make(map[string]bool, len(from.Flags))
	for name := range from.Flags {
		unknown[name] = true
	}
	apply := func(f *Field, s string, at Position) {
		r.at[f.Path] = at
		if err := f.set(s); err != nil {
			if f.secret {
				err = &fault{"has a value that cannot be read", "it is secret and not shown"}
			}
			r.textFault(at, f.Path, err)
		}
	}
	for i := range fields {
		f := &fields[i]
		delete(unknown, f.Flag)
		if s, given := from.Flags[f.Flag]; given {
			apply(f, s, Position{Source: "flag --" + f.Flag})
		} else if s, given := env[f.Env]; given {
			apply(f, s, Position{Source: "environment " + f.Env})
		}
	}
	for name := range unknown {
		var known []string
		for _, f := range fields {
			known = append(known, f.Flag)
		}
		r.unknown(Position{Source: "flag --" + name}, "", "is no known flag", name, known)
	}
}

// validate calls the Validate methods, inner ones first.
func (r *reader) validate(v reflect.Value, path string) {
	for _, f := range fieldsOf(v.Type()) {
		r.validateIn(v.FieldByIndex(f.index), join(path, f.name))
	}
	if v.CanAddr() {
		v = v.Addr()
	}
	switch one := v.Interface().(type) {
	case interface{ Validate() error }:
		r.found(one.Validate(), path)
	case interface{ Validate() []grant.Problem }:
		for _, p := range one.Validate() {
			r.found(p, path)
		}
	}
}

func (r *reader) validateIn(v reflect.Value, path string) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			r.validateIn(v.Elem(), path)
		}
	case reflect.Struct:
		if !single(v.Type()) {
			r.validate(v, path)
		}
	case reflect.Slice:
		for i := range v.Len() {
			r.validateIn(v.Index(i), fmt.Sprintf("%s.%d", path, i))
		}
	case reflect.Map:
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			r.validateIn(v.MapIndex(k), join(path, quoteKey(k.String())))
		}
	}
}

// found reports what Validate of the struct at path returned.
func (r *reader) found(err error, path string) {
	if err == nil {
		return
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			r.found(one, path)
		}
		return
	}
	if p, ok := err.(grant.Problem); ok {
		at := join(path, p.Field)
		r.fault(r.nearestAt(at), at, p.Given, "allowed: "+p.Allowed)
		return
	}
	name, what, ok := strings.Cut(err.Error(), ": ")
	name, _, _ = strings.Cut(name, " (") // a unit, as in "tolerance (ns)"
	if !ok || strings.ContainsAny(name, " \t") {
		r.fault(r.nearestAt(path), path, err.Error(), "")
		return
	}
	what, do, _ := strings.Cut(what, "; ")
	r.fault(r.nearestAt(join(path, name)), join(path, name), what, do)
}
