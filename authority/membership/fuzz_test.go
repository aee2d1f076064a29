package membership

import (
	"testing"

	"github.com/stipend/stipend/authority"
)

// What etcd holds is read without panic; what cannot be read is taken for the
// worse state, never for a live one.
func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"owner":"gw","state":"live"}`))
	f.Add([]byte(`{"owner":"gw","state":"lost"}`))
	f.Add([]byte(`{"state":7}`))
	f.Fuzz(func(t *testing.T, value []byte) {
		owner, state, err := parseRecord(value)
		if err != nil && state != authority.Fenced {
			t.Errorf("unreadable and %v", state)
		}
		if err == nil {
			again, same, err := parseRecord([]byte(record{string(owner), state.String()}.bytes()))
			if err != nil || again != owner || same != state || state == authority.Lost {
				t.Errorf("%q %v came back as %q %v, %v", owner, state, again, same, err)
			}
		}
	})
}
