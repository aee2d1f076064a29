package wire

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stipend/stipend/proto/grant"
	stipendv1 "github.com/stipend/stipend/proto/stipend/v1"
)

// bijection proves: every plain value has exactly one wire value and back, and
// every wire value that the .proto declares has a plain one. count is the
// number of plain values, taken from package grant and not from the tables.
func bijection[P ~uint8, W ~int32](t *testing.T, count int, d protoreflect.EnumDescriptor, to func(P) W, from func(W) (P, error), unspecified bool) {
	t.Helper()
	seen := map[W]P{}
	for i := range count {
		p := P(i)
		if i == 0 && !unspecified {
			continue // the zero value is no value of the enum
		}
		w := to(p)
		if other, twice := seen[w]; twice {
			t.Errorf("%s: %v and %v are both %d on the wire", d.Name(), other, p, w)
		}
		seen[w] = p
		if d.Values().ByNumber(protoreflect.EnumNumber(w)) == nil {
			t.Errorf("%s: %v has the wire value %d, which the .proto does not declare", d.Name(), p, w)
		}
		if back, err := from(w); err != nil || back != p {
			t.Errorf("%s: %v comes back as %v, %v", d.Name(), p, back, err)
		}
	}
	for i := range d.Values().Len() {
		w := W(d.Values().Get(i).Number())
		if _, ok := seen[w]; !ok && w != 0 {
			t.Errorf("%s: %s has no plain value", d.Name(), d.Values().Get(i).Name())
		}
	}
	for _, w := range []W{-1, W(d.Values().Len()), 255, 256, 1 << 30} {
		if d.Values().ByNumber(protoreflect.EnumNumber(w)) != nil {
			continue
		}
		if p, err := from(w); err == nil {
			t.Errorf("%s: unknown %d was read as %v", d.Name(), w, p)
		}
	}
}

func TestEnumsAreBijections(t *testing.T) {
	bijection(t, len(grant.Reasons())+1, stipendv1.Reason(0).Descriptor(), ToReason, FromReason, true)
	bijection(t, int(grant.Off)+1, stipendv1.Mode(0).Descriptor(), ToMode, FromMode, true)
	bijection(t, int(grant.Busy)+1, stipendv1.GrantResult(0).Descriptor(), ToGrantResult, FromGrantResult, false)
	bijection(t, int(grant.Undecided)+1, stipendv1.Verdict(0).Descriptor(), ToVerdict, FromVerdict, false)
}

// A forgotten mode is the strict one, a forgotten result or verdict an error.
func TestUnspecified(t *testing.T) {
	if m, err := FromMode(stipendv1.Mode_MODE_UNSPECIFIED); m != grant.Enforce || err != nil {
		t.Errorf("mode: %v, %v", m, err)
	}
	if r, err := FromGrantResult(0); err == nil {
		t.Errorf("result: %v", r)
	}
	if v, err := FromVerdict(0); err == nil {
		t.Errorf("verdict: %v", v)
	}
}
