package trace

import (
	"testing"
	"time"
)

// Every form that logs use gives the exact instant and the resolution written.
func TestTimeForms(t *testing.T) {
	east := time.FixedZone("east", 3600)
	for _, tt := range []struct {
		text string
		form TimeForm
		want int64
		res  time.Duration
	}{
		{"2023-11-14T22:13:20Z", RFC3339, 1700000000e9, time.Second},
		{"2023-11-14T22:13:20.5Z", RFC3339, 1700000000500000000, 100 * time.Millisecond},
		{"2023-11-15T00:13:20.123456789+02:00", RFC3339, 1700000000123456789, 1},
		{"2023-11-14T17:13:20-05:00", RFC3339, 1700000000e9, time.Second},
		{"2023-11-14 23:13:20.9799600", DateTime, 1700000000979960000, 100},
		{"2023-11-14 22:13:20.001+00:00", DateTime, 1700000000001000000, time.Millisecond},
		{"2023-11-14 22:13:20,001 +0000", DateTime, 1700000000001000000, time.Millisecond},
		{"2023-11-14T23:13:20", DateTime, 1700000000e9, time.Second},
		{"14/Nov/2023:22:13:20 +0000", CombinedTime, 1700000000e9, time.Second},
		{"1700000000", UnixSeconds, 1700000000e9, time.Second},
		{"1700000000.25", UnixSeconds, 1700000000250000000, 10 * time.Millisecond},
		{"1700000000.1234567891", UnixSeconds, 1700000000123456789, 1},
		{"1700000000250", UnixMillis, 1700000000250000000, time.Millisecond},
		{"1700000000250.5", UnixMillis, 1700000000250500000, 100 * time.Microsecond},
		{"1700000000250500", UnixMicros, 1700000000250500000, time.Microsecond},
		{"1700000000250500001", UnixNanos, 1700000000250500001, 1},
		{"9223372036854775807", UnixNanos, 1<<63 - 1, 1},
	} {
		for _, form := range []TimeForm{tt.form, AnyTime} {
			at, fitted, res, f := parseTime(tt.text, form, east)
			if f != nil || int64(at) != tt.want || fitted != tt.form || res != tt.res {
				t.Errorf("%s as %v: %d %v %v %v, want %d %v", tt.text, form, at, fitted, res, f, tt.want, tt.res)
			}
		}
	}
	if at, _, res, f := parseTime("0.5", UnixSeconds, time.UTC); f != nil || at != 5e8 || res != 1e8 {
		t.Errorf("a stated form takes any number: %v %v %v", at, res, f)
	}
	for _, tt := range []struct {
		text string
		form TimeForm
	}{
		{"", AnyTime}, {"yesterday", AnyTime}, {"12345", AnyTime}, {"1.7e9", AnyTime}, {"-1", UnixSeconds}, {"+1", UnixSeconds}, {".5", UnixSeconds}, {"5.", UnixSeconds},
		{"9300000000", UnixSeconds}, {"9223372036854775808", UnixNanos}, {"99999999999999999999", UnixNanos}, {"1e9", UnixNanos}, {"1.x", UnixSeconds},
		{"2023-13-01T00:00:00Z", RFC3339}, {"1600-01-01T00:00:00Z", RFC3339}, {"2300-01-01T00:00:00Z", AnyTime}, {"2023-11-14 22:13:20", RFC3339},
	} {
		if at, _, _, f := parseTime(tt.text, tt.form, time.UTC); f == nil {
			t.Errorf("%q as %v was read as %d", tt.text, tt.form, at)
		}
	}
	for f := AnyTime; int(f) < len(timeFormNames); f++ {
		if got, err := ParseTimeForm(f.String()); err != nil || got != f {
			t.Errorf("%v: %v, %v", f, got, err)
		}
	}
	for k := Admissions; int(k) < len(kindNames); k++ {
		if got, err := ParseKind(k.String()); err != nil || got != k {
			t.Errorf("%v: %v, %v", k, got, err)
		}
	}
}
