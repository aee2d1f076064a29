// Gen compiles the .proto files of the repository and writes the generated Go
// code beside them. With -check it writes nothing and fails when a committed
// file differs from what would be written.
//
// It needs neither protoc nor buf: the compiler is a Go library, and both
// plugins are tools of this module.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/linker"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// module is what the import paths of generated packages begin with; the rest
// of such a path is the folder in the repository.
const module = "github.com/stipend/stipend"

var plugins = []string{"protoc-gen-go", "protoc-gen-go-grpc"}

func main() {
	check := flag.Bool("check", false, "fail when a generated file is not current, instead of writing it")
	root := flag.String("root", ".", "root of the repository")
	flag.Parse()
	if err := run(context.Background(), *root, *check); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, root string, check bool) error {
	protoDir := filepath.Join(root, "proto")
	sources, err := find(protoDir, ".proto")
	if err != nil {
		return err
	}
	if len(sources) == 0 {
		return fmt.Errorf("no .proto files under %s", protoDir)
	}
	request, err := compile(ctx, protoDir, sources)
	if err != nil {
		return err
	}
	want := map[string][]byte{} // by path under root
	for _, plugin := range plugins {
		if err := runPlugin(ctx, plugin, request, want); err != nil {
			return fmt.Errorf("%s: %w", plugin, err)
		}
	}
	return reconcile(root, protoDir, want, check)
}

// find lists the files under dir with the extension, as slash paths relative
// to dir, in order.
func find(dir, ext string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ext) {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		found = append(found, filepath.ToSlash(rel))
		return err
	})
	slices.Sort(found)
	return found, err
}

// compile makes the request that protoc would send to a plugin: every file of
// the transitive closure, dependencies before dependents.
func compile(ctx context.Context, dir string, sources []string) (*pluginpb.CodeGeneratorRequest, error) {
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{dir}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	files, err := compiler.Compile(ctx, sources...)
	if err != nil {
		return nil, err
	}
	request := &pluginpb.CodeGeneratorRequest{
		FileToGenerate: sources,
		Parameter:      proto.String("module=" + module),
	}
	seen := map[string]bool{}
	var add func(f protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if seen[f.Path()] {
			return
		}
		seen[f.Path()] = true
		imports := f.Imports()
		for i := range imports.Len() {
			add(imports.Get(i).FileDescriptor)
		}
		request.ProtoFile = append(request.ProtoFile, descriptor(f))
	}
	for _, f := range files {
		add(f)
	}
	return request, nil
}

func descriptor(f protoreflect.FileDescriptor) *descriptorpb.FileDescriptorProto {
	if r, ok := f.(linker.Result); ok {
		return r.FileDescriptorProto() // keeps comments
	}
	return protoutil.ProtoFromFileDescriptor(f)
}

// runPlugin adds the files that one plugin makes of the request to out.
func runPlugin(ctx context.Context, name string, request *pluginpb.CodeGeneratorRequest, out map[string][]byte) error {
	in, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	// This program runs within its own module (go run), which has the tools.
	cmd := exec.CommandContext(ctx, "go", "tool", name)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
	raw, err := cmd.Output()
	if err != nil {
		return err
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(raw, &response); err != nil {
		return err
	}
	if response.Error != nil {
		return fmt.Errorf("%s", response.GetError())
	}
	for _, f := range response.GetFile() {
		out[f.GetName()] = []byte(f.GetContent())
	}
	return nil
}

// reconcile makes the generated files under protoDir equal to want, or with
// check reports every one that is not, files without a source included.
func reconcile(root, protoDir string, want map[string][]byte, check bool) error {
	present, err := find(protoDir, ".pb.go")
	if err != nil {
		return err
	}
	var stale []string
	for _, rel := range present {
		name := "proto/" + rel
		if _, ok := want[name]; ok {
			continue
		}
		stale = append(stale, name+" (has no source)")
		if !check {
			if err := os.Remove(filepath.Join(root, name)); err != nil {
				return err
			}
		}
	}
	for name, content := range want {
		path := filepath.Join(root, filepath.FromSlash(name))
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
			continue
		}
		stale = append(stale, name)
		if !check {
			if err := os.WriteFile(path, content, 0o644); err != nil {
				return err
			}
		}
	}
	slices.Sort(stale)
	switch {
	case len(stale) == 0:
		return nil
	case check:
		return fmt.Errorf("not current, run make gen: %s", strings.Join(stale, ", "))
	}
	fmt.Println("gen: wrote", strings.Join(stale, ", "))
	return nil
}
