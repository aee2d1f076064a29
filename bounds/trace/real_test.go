package trace

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stipend/stipend/bounds"
	"github.com/stipend/stipend/proto/grant"
)

// realTrace is a file in the folder that STIPEND_TRACES names.
func realTrace(t *testing.T, file string) string {
	dir := os.Getenv("STIPEND_TRACES")
	path := filepath.Join(dir, file)
	if _, err := os.Stat(path); dir == "" || err != nil {
		t.Skipf("STIPEND_TRACES names no folder with %s", file)
	}
	return path
}

// A web site's log: second resolution, written at completion and so out of
// order. It is judged whole, against a policy that allows its busiest client and
// one that does not.
func TestRealCombinedLog(t *testing.T) {
	path := realTrace(t, "apache-combined.log")
	for burst, held := range map[grant.Units]bool{1_000: true, 5: false} {
		r, err := OpenFile(Combined, path, Options{Window: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		j, err := bounds.NewJudge(bounds.Config{Skew: r.Resolution()}, 5000, &grant.Policy{Rate: grant.Rate{Units: 1, Per: time.Minute}, Burst: burst})
		if err != nil {
			t.Fatal(err)
		}
		n, err := Judge(j, r.Records())
		if err != nil {
			t.Fatal(err)
		}
		if r.Resolution() != time.Second || n != r.Stats().Records || len(j.Reports()) != 1753 || j.Held() != held {
			t.Errorf("burst %d: %d records, %d clients, resolution %v, held %v", burst, n, len(j.Reports()), r.Resolution(), j.Held())
		}
	}
	r, err := OpenFile(Combined, path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err = collect(t, r); err == nil {
		t.Error("a log out of order passed a window of zero")
	}
}

// A trace of a language model service: cost is the tokens, one tenant.
func TestRealTokens(t *testing.T) {
	r, err := OpenFile(CSV, realTrace(t, "azure-llm-code-2023.csv"), Options{
		Columns: Columns{Time: "TIMESTAMP", TenantIs: "hot", Cost: []string{"ContextTokens", "GeneratedTokens"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	j, err := bounds.NewJudge(bounds.Config{Skew: r.Resolution()}, 1, &grant.Policy{Rate: grant.Rate{Units: 3000, Per: time.Second}, Burst: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	n, err := Judge(j, r.Records())
	if err != nil || n != 8819 || r.Resolution() != 100 {
		t.Fatalf("%d records, resolution %v, %v", n, r.Resolution(), err)
	}
	if v := j.Reports()[0]; v.Held || v.Over() == 0 {
		t.Errorf("the policy is overrun: %v", v)
	}
}
