package daemon

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stipend/stipend/authority"
	"github.com/stipend/stipend/proto/grant"
)

// clock reads the machine's monotonic clocks; a field, so that tests can let
// deadlines pass.
type clock func() authority.Reading

// machineClock costs two system calls.
func machineClock() authority.Reading {
	return authority.Reading{Mono: clockNow(unix.CLOCK_MONOTONIC), Raw: clockNow(unix.CLOCK_MONOTONIC_RAW)}
}

func clockNow(id int32) grant.Instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		panic(fmt.Sprintf("clock %d: %v", id, err)) // every Linux has both
	}
	return grant.Instant(ts.Nano())
}

// deadline is when the budget ends in the shell's monotonic time. A spent
// budget ends just before now.
func deadline(now grant.Instant, budget time.Duration) grant.Instant {
	if budget <= 0 {
		return now - 1
	}
	return now.Add(budget)
}
