package structure

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// root is the repository, seen from this package.
const root = "../../.."

// goFile is a parsed file of this module.
type goFile struct {
	pkg, name string // folder in the repository, file within it
	syntax    *ast.File
	raw       []byte
}

func (f goFile) path() string { return f.pkg + "/" + f.name }

// sources parses every Go file of the repository but those of the tools.
func sources(t *testing.T) (files []goFile, set *token.FileSet) {
	t.Helper()
	set = token.NewFileSet()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if rel == ".git" || rel == "bin" || d.Name() == "testdata" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") {
			return nil
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		syntax, err := parser.ParseFile(set, rel, raw, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, goFile{pkg: filepath.ToSlash(filepath.Dir(rel)), name: d.Name(), syntax: syntax, raw: raw})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 10 {
		t.Fatalf("found only %d files: is the root right?", len(files))
	}
	return files, set
}

func generated(f goFile) bool { return strings.HasSuffix(f.name, ".pb.go") }

func tool(f goFile) bool { return within(f.pkg, ".ci") }

func TestImports(t *testing.T) {
	files, _ := sources(t)
	unused := maps.Clone(exempt)
	for _, f := range files {
		if tool(f) {
			continue // a module of its own
		}
		for _, one := range f.syntax.Imports {
			path, err := strconv.Unquote(one.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if exempt[f.path()] == path {
				delete(unused, f.path())
			}
			if fault := importFault(f.pkg, f.name, path); fault != "" {
				t.Errorf("%s imports %s: %s", f.path(), path, fault)
			}
			if one.Name != nil && one.Name.Name == "." {
				t.Errorf("%s: dot import of %s", f.path(), path)
			}
		}
	}
	for file, imported := range unused {
		t.Errorf("%s is exempt for %s, which it does not import", file, imported)
	}
}

// Pure packages read no clock, start nothing and wait for nothing; no test
// sleeps.
func TestCalls(t *testing.T) {
	files, set := sources(t)
	for _, f := range files {
		if tool(f) || generated(f) {
			continue
		}
		for _, fault := range callFaults(f, set) {
			t.Error(fault)
		}
	}
}

func callFaults(f goFile, set *token.FileSet) (faults []string) {
	test := strings.HasSuffix(f.name, "_test.go")
	_, isPure := pure[f.pkg]
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			if isPure && !test {
				faults = append(faults, fmt.Sprintf("%v: a pure package starts a goroutine", set.Position(n.Pos())))
			}
		case *ast.SelectorExpr:
			from, ok := n.X.(*ast.Ident)
			if !ok || from.Name != "time" {
				return true
			}
			if isPure && !test && slices.Contains(impureTime, n.Sel.Name) {
				faults = append(faults, fmt.Sprintf("%v: a pure package uses time.%s; time is an argument", set.Position(n.Pos()), n.Sel.Name))
			}
			if test && n.Sel.Name == "Sleep" && !inBubble(f) {
				faults = append(faults, fmt.Sprintf("%v: a test sleeps; pass the time, wait for the state, or use testing/synctest", set.Position(n.Pos())))
			}
		}
		return true
	})
	return faults
}

// Each source breaks the given number of rules.
func TestCallRulesBite(t *testing.T) {
	for _, one := range []struct {
		pkg, name, body string
		want            int
	}{
		{"authority", "a.go", `import "time"; var now = time.Now; func f() { go f(); _ = time.Since }`, 3},
		{"authority", "a.go", `import "time"; const d = time.Second`, 0},
		{"authority/daemon", "a.go", `import "time"; var now = time.Now`, 0},
		{"authority", "a_test.go", `import "time"; func f() { go f(); time.Sleep(1) }`, 1},
		{"authority/daemon", "a_test.go", `import ("time"; "testing/synctest"); func f() { time.Sleep(1); synctest.Wait() }`, 0},
	} {
		set := token.NewFileSet()
		syntax, err := parser.ParseFile(set, one.name, "package p; "+one.body, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := callFaults(goFile{pkg: one.pkg, name: one.name, syntax: syntax}, set); len(got) != one.want {
			t.Errorf("%s: %q, wanted %d", one.body, got, one.want)
		}
	}
}

// inBubble reports whether the test file runs in synctest bubbles, in which
// time is virtual and a sleep neither takes nor guesses time.
func inBubble(f goFile) bool {
	return slices.ContainsFunc(f.syntax.Imports, func(i *ast.ImportSpec) bool { return i.Path.Value == `"testing/synctest"` })
}

var unfinished = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)

func TestFiles(t *testing.T) {
	files, _ := sources(t)
	documented := map[string]bool{}
	for _, f := range files {
		documented[f.pkg] = documented[f.pkg] || f.syntax.Doc != nil
	}
	for _, f := range files {
		if generated(f) {
			continue
		}
		if lines := bytes.Count(f.raw, []byte("\n")); lines > maxLines {
			t.Errorf("%s has %d lines, allowed are %d: it holds two ideas", f.path(), lines, maxLines)
		}
		if at := unfinished.FindIndex(f.raw); at != nil {
			t.Errorf("%s:%d: an unfinished note", f.path(), 1+bytes.Count(f.raw[:at[0]], []byte("\n")))
		}
		if name := f.syntax.Name.Name; slices.Contains(vagueNames, strings.TrimSuffix(name, "_test")) {
			t.Errorf("%s: package %s is not named by what it provides", f.path(), name)
		}
		if !documented[f.pkg] {
			t.Errorf("%s: the package has no doc comment", f.pkg)
			documented[f.pkg] = true
		}
	}
}

func TestTopLevel(t *testing.T) {
	// What is not committed is nobody's business but its owner's.
	cmd := exec.Command("git", "ls-files", "--cached")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("no git checkout here: %v", err)
	}
	seen := map[string]bool{}
	for path := range strings.Lines(string(out)) {
		top, _, _ := strings.Cut(strings.TrimSpace(path), "/")
		if !seen[top] && !slices.Contains(topLevel, top) {
			t.Errorf("%s lies in the root of the repository; allowed are %s", top, strings.Join(topLevel, " "))
		}
		seen[top] = true
	}
}

// The binaries carry nothing that they are to be free of, at any depth.
func TestBinariesStayFree(t *testing.T) {
	for binary, banned := range free {
		if _, err := os.Stat(filepath.Join(root, binary)); errors.Is(err, fs.ErrNotExist) {
			t.Logf("%s does not exist yet", binary)
			continue
		}
		cmd := exec.Command("go", "list", "-deps", "-json=ImportPath", "./"+binary)
		cmd.Dir = root
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v\n%s", err, stderr.Bytes())
		}
		decoder := json.NewDecoder(bytes.NewReader(out))
		count := 0
		for {
			var pkg struct{ ImportPath string }
			if err := decoder.Decode(&pkg); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			count++
			for _, one := range banned {
				if within(pkg.ImportPath, one) {
					t.Errorf("%s depends on %s; it is to be free of %s", binary, pkg.ImportPath, one)
				}
			}
		}
		if count < 20 {
			t.Errorf("%s: only %d dependencies were listed", binary, count)
		}
	}
}

// The rules can fail: each row breaks one of them, or keeps it narrowly.
func TestRulesBite(t *testing.T) {
	for _, one := range []struct {
		pkg, file, imported string
		allowed             bool
	}{
		{"authority", "ledger.go", module + "/agent", false},
		{"authority", "ledger.go", module + "/proto/grant", true},
		{"authority", "ledger.go", module + "/proto/wire", false},
		{"authority", "ledger.go", "os", false},
		{"authority", "ledger.go", "net/http", false},
		{"authority", "ledger.go", "math/rand/v2", false},
		{"authority", "ledger.go", "math/bits", true},
		{"authority", "ledger.go", "google.golang.org/grpc", false},
		{"authority", "ledger_test.go", "pgregory.net/rapid", true},
		{"authority", "ledger_test.go", module + "/agent", false},
		{"agent", "wallet.go", "sync/atomic", true},
		{"agent", "tenant.go", "sync", false},
		{"agent/link", "link.go", module + "/authority/daemon", false},
		{"agent/link", "link.go", module + "/proto/wire", true},
		{"agent/link", "link.go", "google.golang.org/grpc/codes", true},
		{"agent/link", "link.go", "github.com/cockroachdb/pebble/v2", false},
		{"authority/pebblestore", "store.go", "github.com/cockroachdb/pebble/v2/vfs", true},
		{"authority/pebblestore", "store.go", "go.etcd.io/etcd/client/v3", false},
		{"authority/daemon", "daemon.go", "go.yaml.in/yaml/v3", false},
		{"authority/daemon", "daemon.go", "pgregory.net/rapid", false},
		{"authority/daemon", "daemon.go", "github.com/spf13/cobra", false},
		{"authority/daemon", "daemon.go", module + "/cmd/internal/conf", false},
		{"bounds", "checker.go", module + "/authority", false},
		{"bounds/trace", "trace.go", "os", true},
		{"proto/grant", "ident.go", "crypto/rand", true},
		{"proto/grant", "policy.go", "crypto/rand", false},
		{"proto/wire", "enum.go", module + "/bounds", false},
		{"sim", "world.go", module + "/authority", true},
		{"sim", "world.go", module + "/cmd/stipend", false},
		{"cmd/stipend", "main.go", module + "/sim", true},
	} {
		fault := importFault(one.pkg, one.file, one.imported)
		if (fault == "") != one.allowed {
			t.Errorf("%s/%s importing %s: %q, wanted allowed=%v", one.pkg, one.file, one.imported, fault, one.allowed)
		}
	}
}
