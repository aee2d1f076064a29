package daemon

import (
	"strings"
	"testing"
)

// A page token is read back as it was made, and a foreign text is refused or
// read without panic.
func FuzzReadToken(f *testing.F) {
	f.Add("3", "tenant", "x")
	f.Add("", "", "")
	f.Fuzz(func(t *testing.T, before, after, foreign string) {
		if !strings.Contains(before, "\x00") {
			b, a, err := readToken(token(before, after))
			if err != nil || b != before || a != after {
				t.Errorf("%q, %q came back as %q, %q, %v", before, after, b, a, err)
			}
		}
		if b, a, err := readToken(foreign); err == nil && foreign != "" && token(b, a) == "" {
			t.Errorf("%q is a token of nothing", foreign)
		}
	})
}
