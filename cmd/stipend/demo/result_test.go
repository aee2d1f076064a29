package demo

import (
	"bytes"
	"strings"
	"testing"
)

// TestMessagesAreExplained proves that more than a message for each admitted
// request is explained to people, and fewer are not.
func TestMessagesAreExplained(t *testing.T) {
	for messages, want := range map[float64]bool{12: false, 1000: false, 1000.5: true, 2400: true} {
		r := &Result{Held: true, Kept: true, Messages: messages}
		r.explainMessages()
		var out bytes.Buffer
		if err := r.Write(&out); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(out.String(), "Cold ones are checked request by request"); got != want {
			t.Errorf("%g messages: explained %v, want %v\n%s", messages, got, want, &out)
		}
	}
}
