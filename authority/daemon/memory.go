package daemon

import (
	"bytes"
	"os"
	"runtime/debug"
	"strconv"
)

// setMemory sets the collector's pace and its guard, and returns the limit.
func setMemory(percent int, limit int64) int64 {
	if limit == 0 {
		limit = memoryThere() / 10 * 8
	}
	debug.SetGCPercent(percent)
	if limit > 0 {
		debug.SetMemoryLimit(limit)
	}
	return limit
}

// memoryThere is the smaller of the control group's limit and the machine's
// memory in bytes; 0: not known.
func memoryThere() int64 {
	there := int64(0)
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		for line := range bytes.Lines(b) {
			if f := bytes.Fields(line); len(f) >= 2 && string(f[0]) == "MemTotal:" {
				if kib, err := strconv.ParseInt(string(f[1]), 10, 64); err == nil {
					there = kib << 10
				}
			}
		}
	}
	if b, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if n, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64); err == nil && (there == 0 || n < there) {
			there = n
		}
	}
	return there
}
