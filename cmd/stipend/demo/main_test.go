package demo

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain proves that no test leaves a goroutine behind.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
