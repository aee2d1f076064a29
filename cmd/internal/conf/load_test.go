package conf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"github.com/stipend/stipend/proto/grant"
)

// sample has a field of every kind that is supported.
type sample struct {
	Listen  string        `yaml:"listen" help:"address to listen on"`
	Peers   []string      `yaml:"peers"`
	Debug   bool          `yaml:"debug"`
	Mode    grant.Mode    `yaml:"mode"`
	Ratio   float64       `yaml:"ratio"`
	Ceiling grant.Rate    `yaml:"ceiling" conf:"unlimited"`
	Budget  time.Duration `yaml:"budget"`
	Token   string        `yaml:"token" conf:"secret"`
	Store   store         `yaml:"store"`
	TLS     *tls          `yaml:"tls"`
	Routes  []route       `yaml:"routes"`
	Labels  map[string]string
	Names   map[string]string `yaml:"names"`
}

type store struct {
	Path     string `yaml:"path"`
	Cache    int64  `yaml:"cache" conf:"bytes"`
	MaxInbox int    `yaml:"max_inbox"`
	Files    uint16 `yaml:"files" conf:"unlimited"`
}

// Validate reports in the form of a component that knows nothing of conf.
func (s store) Validate() error {
	var errs []error
	if s.MaxInbox < 1 || s.MaxInbox > 100 {
		errs = append(errs, fmt.Errorf("max_inbox: %d; allowed: 1 to 100", s.MaxInbox))
	}
	if s.Path == "" {
		errs = append(errs, grant.Problem{Field: "path", Given: "nothing", Allowed: "a folder"})
	}
	return errors.Join(errs...)
}

type tls struct {
	Cert string `yaml:"cert"`
	Key  string `yaml:"key" conf:"secret"`
}

type route struct {
	Pattern string `yaml:"pattern"`
	Class   string `yaml:"class"`
}

func (r route) Validate() error {
	if r.Class == "" {
		return errors.New("class: is empty; name a route class")
	}
	return nil
}

func defaults() sample {
	return sample{Listen: ":8080", Budget: 50 * time.Millisecond, Store: store{Path: "data", Cache: 8 << 20, MaxInbox: 10, Files: 64}}
}

// configStory loads the input over the defaults: env=(A=1, B=2), flag=(x=1).
func configStory(d *datadriven.TestData) string {
	var from Sources
	for _, arg := range d.CmdArgs {
		for _, v := range arg.Vals {
			if arg.Key == "env" {
				from.Env = append(from.Env, v)
				continue
			}
			if from.Flags == nil {
				from.Flags = map[string]string{}
			}
			name, value, _ := strings.Cut(v, "=")
			from.Flags[name] = value
		}
	}
	cfg := defaults()
	if err := load("c.yaml", []byte(d.Input), &cfg, from); err != nil {
		return err.Error()
	}
	return string(YAML(&cfg))
}

// Flags win over the environment, that over the file, that over the defaults.
func TestPrecedence(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte("listen: file\nbudget: 2s\nstore: {path: file}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	err := Load(path, &cfg, Sources{
		Env:   []string{"STIPEND_LISTEN=env", "STIPEND_STORE_PATH=env", "STIPEND_PORT=tcp://10.0.0.1:80", "LISTEN=other"},
		Flags: map[string]string{"listen": "flag"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Listen != "flag" || cfg.Store.Path != "env" || cfg.Budget != 2*time.Second || cfg.Store.MaxInbox != 10 {
		t.Errorf("%+v", cfg)
	}
	if err := Load(path+".gone", &cfg, Sources{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a named file that is not there: %v", err)
	}
	cfg = defaults()
	if err := Load("", &cfg, Sources{}); err != nil || !reflect.DeepEqual(cfg, defaults()) {
		t.Errorf("no file: %+v, %v", cfg, err)
	}
}

func TestFields(t *testing.T) {
	cfg := defaults()
	cfg.Token = "hidden"
	var b strings.Builder
	for _, f := range Fields(&cfg) {
		fmt.Fprintln(&b, f.Path, f.Flag, f.Env, f.Default, f.Bool, f.Help)
	}
	const want = `listen listen STIPEND_LISTEN :8080 false address to listen on
peers peers STIPEND_PEERS  false 
debug debug STIPEND_DEBUG false true 
mode mode STIPEND_MODE enforce false 
ratio ratio STIPEND_RATIO 0 false 
ceiling ceiling STIPEND_CEILING 0 false 
budget budget STIPEND_BUDGET 50ms false 
token token STIPEND_TOKEN  false 
store.path store-path STIPEND_STORE_PATH data false 
store.cache store-cache STIPEND_STORE_CACHE 8MiB false 
store.max_inbox store-max-inbox STIPEND_STORE_MAX_INBOX 10 false 
store.files store-files STIPEND_STORE_FILES 64 false 
`
	if b.String() != want {
		t.Errorf("got\n%s\nwanted\n%s", b.String(), want)
	}
	defer func() {
		if recover() == nil {
			t.Error("two fields with one variable were not noticed")
		}
	}()
	Fields(&struct {
		A struct {
			B int `yaml:"b"`
		} `yaml:"a"`
		C int `yaml:"a_b"`
	}{})
}

// What --print-config shows reads back as the same configuration, and no
// secret is in it.
func TestYAMLRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		str := func(label string) string {
			return rapid.OneOf(rapid.SampledFrom([]string{"", "true", "null", "1", "~", "a: b", "- x", "# y", "unlimited", "1h", "0x1"}),
				rapid.StringMatching(`[ -~é\n]{0,30}`)).Draw(t, label)
		}
		cfg := sample{
			Listen: str("listen"), Debug: rapid.Bool().Draw(t, "debug"), Mode: grant.Mode(rapid.IntRange(0, 2).Draw(t, "mode")),
			Ratio: rapid.Float64Range(-1e30, 1e30).Draw(t, "ratio"), Ceiling: drawRate(t),
			Budget: time.Duration(rapid.Int64Min(0).Draw(t, "budget")),
			Store: store{
				Path: "p" + str("path"), Cache: rapid.Int64().Draw(t, "cache"),
				MaxInbox: rapid.IntRange(1, 100).Draw(t, "inbox"), Files: rapid.Uint16().Draw(t, "files"),
			},
			Names:  map[string]string{},
			Peers:  []string{},
			Routes: []route{},
		}
		for range rapid.IntRange(0, 3).Draw(t, "names") {
			cfg.Names[str("name")] = str("value")
			cfg.Peers = append(cfg.Peers, str("peer"))
			cfg.Routes = append(cfg.Routes, route{Pattern: str("pattern"), Class: "c"})
		}
		raw := YAML(&cfg)
		var back sample
		if err := load("c.yaml", raw, &back, Sources{}); err != nil {
			t.Fatalf("%s\n%v", raw, err)
		}
		if !reflect.DeepEqual(back, cfg) {
			t.Fatalf("%s\nwas  %+v\nread %+v", raw, cfg, back)
		}
	})
	cfg := defaults()
	cfg.Token, cfg.TLS = "hush-1", &tls{Key: "hush-2"}
	if out := string(YAML(&cfg)); strings.Contains(out, "hush") || strings.Count(out, redacted) != 2 {
		t.Errorf("secrets:\n%s", out)
	}
}

// For any bytes: no panic, and every fault has a place and says what is wrong.
func FuzzLoad(f *testing.F) {
	f.Add([]byte("listen: x\npeers: [a, b]\nstore: {cache: 64MiB, files: unlimited}\ntls: {cert: a}\nroutes: [{class: c}]\n"))
	f.Add([]byte("ratio: 1.5\nnames: {a: 1, a: 2}\nstore:\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		cfg := defaults()
		err := load("c.yaml", raw, &cfg, Sources{})
		if err == nil {
			return
		}
		faults, ok := err.(Problems)
		if !ok || len(faults) == 0 {
			t.Fatalf("%T %v", err, err)
		}
		for _, one := range faults {
			if one.At.Source == "" || one.What == "" {
				t.Fatalf("incomplete: %+v", one)
			}
		}
	})
}
