package structure

import (
	"fmt"
	"strings"
)

const module = "github.com/stipend/stipend"

// topLevel is what may lie in the root of the repository.
var topLevel = words(`
	.ci .git .gitattributes .gitignore CHANGELOG.md LICENSE Makefile README.md go.mod go.sum
	agent authority bin bounds cmd deploy docs proto sim
`)

// pure packages are functions of their arguments: no clock, no chance, no I/O,
// no goroutines of their own. They import the standard library, without what
// impureStd lists, and the layers given here.
var pure = map[string][]string{
	"proto/grant": {},
	"bounds":      {"proto/grant"},
	"authority":   {"proto/grant", "bounds"},
	"agent":       {"proto/grant", "bounds"},
}

// impureStd may not be imported by pure packages. Package time is allowed for
// its Duration; impureTime lists what of it is not.
var impureStd = words(`
	net net/... os os/... io/fs syscall log log/... math/rand math/rand/... crypto/rand
	runtime/... sync testing/... database/... plugin
`)

var impureTime = words(`Now Since Until Sleep After AfterFunc Tick NewTimer NewTicker`)

// exempt are single files of pure packages that may import one thing of
// impureStd more, each with its reason.
var exempt = map[string]string{
	// Draws 128 bits for a new incarnation, from the shells only.
	"proto/grant/ident.go": "crypto/rand",
}

// layers say which folders may not be imported from which: a package under the
// first may import nothing under the others.
var layers = map[string][]string{
	"proto":     {"bounds", "authority", "agent", "sim", "cmd"},
	"bounds":    {"authority", "agent", "sim", "cmd"},
	"authority": {"agent", "sim", "cmd"},
	"agent":     {"authority", "sim", "cmd"},
	"sim":       {"cmd"},
}

// importers says which packages may import a library, tests included. A third
// party's module has one place where it is known, so that it can be replaced.
var importers = map[string][]string{
	"google.golang.org/grpc": {
		"proto/stipend/v1", "agent/link/...", "agent/daemon", "agent/doors/...", "authority/daemon", "authority/daemon/...",
		"cmd/stipend", "cmd/stipend/...", "cmd/internal/...",
	},
	"google.golang.org/protobuf": {
		"proto/stipend/v1", "proto/wire", "agent/link/...", "agent/daemon", "agent/doors/...", "authority/daemon", "authority/daemon/...",
		"cmd/stipend", "cmd/stipend/...", "cmd/internal/...",
	},
	"go.etcd.io":                             {"authority/membership", "authority/etcdstore", "authority/daemon"},
	"github.com/cockroachdb/pebble":          {"authority/pebblestore", "cmd/internal/versus"}, // versus measures the bare library
	"github.com/prometheus":                  {"authority/daemon", "authority/daemon/...", "agent/daemon", "agent/daemon/...", "agent/doors/..."},
	"go.yaml.in/yaml":                        {"cmd/internal/conf"},
	"github.com/spf13":                       {"cmd/..."},
	"github.com/cenkalti/backoff":            {"agent/link/..."},
	"github.com/redis":                       {"cmd/internal/versus"},
	"gonum.org":                              {"sim/report", "cmd/stipend/..."},
	"github.com/HdrHistogram":                {"cmd/stipend/...", "cmd/internal/...", "sim/..."},
	"github.com/envoyproxy/go-control-plane": {"agent/doors/..."},
	"github.com/coreos/go-systemd":           {"cmd/internal/...", "cmd/stipend-authority", "cmd/stipend-agent"},
}

// testOnly may be imported by tests alone.
var testOnly = []string{
	"pgregory.net/rapid", "github.com/cockroachdb/datadriven", "github.com/rogpeppe/go-internal", "go.uber.org/goleak",
	"github.com/anishathalye/porcupine", "github.com/Shopify/toxiproxy", "github.com/chromedp", "testing",
}

// toolsOfTests are packages that exist for tests and import testOnly ones.
var toolsOfTests = []string{"authority/storetest", "sim/...", "cmd/internal/structure"}

// free binaries: the first depends on nothing under the others, at any depth.
// The agent runs beside every gateway.
var free = map[string][]string{
	"cmd/stipend-agent": {"github.com/cockroachdb/pebble", "go.etcd.io", module + "/authority", module + "/sim", "gonum.org"},
}

const maxLines = 800

// vagueNames say nothing about what a package provides.
var vagueNames = words(`util utils common helper helpers types models manager handler processor misc base shared`)

func words(s string) []string { return strings.Fields(s) }

// matches reports whether path is one of the patterns; "x/..." is x and
// everything under it.
func matches(path string, patterns []string) bool {
	for _, p := range patterns {
		if under, ok := strings.CutSuffix(p, "/..."); ok && within(path, under) || p == path {
			return true
		}
	}
	return false
}

func within(path, folder string) bool {
	return path == folder || strings.HasPrefix(path, folder+"/")
}

// importFault says why a package (its folder in the repository) may not import
// a path from the file (a name within the folder), or "".
func importFault(pkg, file, imported string) string {
	test := strings.HasSuffix(file, "_test.go")
	own, ours := strings.CutPrefix(imported, module+"/")
	if lower, ok := pure[pkg]; ok && !test {
		switch {
		case ours && !matches(own, lower):
			return fmt.Sprintf("is pure and may import of this module only %v", lower)
		case !ours && strings.Contains(strings.SplitN(imported, "/", 2)[0], "."):
			return "is pure and may import only the standard library"
		case !ours && matches(imported, impureStd) && imported != "sync/atomic" && exempt[pkg+"/"+file] != imported:
			return "is pure: what it needs of the world is passed in"
		}
	}
	if ours {
		for folder, above := range layers {
			for _, upper := range above {
				if within(pkg, folder) && within(own, upper) {
					return fmt.Sprintf("%s does not import %s", folder, upper)
				}
			}
		}
		return ""
	}
	for library, allowed := range importers {
		if (within(imported, library) || strings.HasPrefix(imported, library+"/v")) && !matches(pkg, allowed) {
			return fmt.Sprintf("%s is imported only by %v", library, allowed)
		}
	}
	for _, library := range testOnly {
		if within(imported, library) && !test && !matches(pkg, toolsOfTests) {
			return library + " is for tests"
		}
	}
	return ""
}
