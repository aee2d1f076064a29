package trace

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// TimeForm is how a log writes times.
type TimeForm uint8

const (
	// AnyTime takes the form of the first time read for all; a bare number is
	// seconds, ms, us or ns by its 9-10, 12-13, 15-16 or 18-19 digits.
	AnyTime      TimeForm = iota
	RFC3339               // 2006-01-02T15:04:05.999999999Z, or +02:00
	DateTime              // 2006-01-02 15:04:05.9999999, with or without a zone; also with a T
	CombinedTime          // 02/Jan/2006:15:04:05 -0700
	UnixSeconds           // 1136214245, also with decimals
	UnixMillis
	UnixMicros
	UnixNanos
)

var timeFormNames = []string{"any", "rfc3339", "datetime", "combined", "unix", "unix-ms", "unix-us", "unix-ns"}

func (f TimeForm) String() string {
	if int(f) < len(timeFormNames) {
		return timeFormNames[f]
	}
	return fmt.Sprintf("timeform(%d)", uint8(f))
}

// ParseTimeForm reads what String writes.
func ParseTimeForm(s string) (TimeForm, error) {
	if i, ok := indexOf(timeFormNames, s); ok {
		return TimeForm(i), nil
	}
	return 0, fmt.Errorf("trace: time form: %q; allowed: %s", s, strings.Join(timeFormNames, ", "))
}

var layouts = map[TimeForm][]string{
	RFC3339:      {time.RFC3339},
	DateTime:     {"2006-01-02 15:04:05", "2006-01-02 15:04:05Z07:00", "2006-01-02 15:04:05 -0700", "2006-01-02T15:04:05"},
	CombinedTime: {"02/Jan/2006:15:04:05 -0700"},
}

var numberUnits = map[TimeForm]time.Duration{
	UnixSeconds: time.Second, UnixMillis: time.Millisecond, UnixMicros: time.Microsecond, UnixNanos: 1,
}

// parseTime reads a time in the form, in the location if it names no zone. It
// returns the form that fitted, for AnyTime, and the resolution as written.
func parseTime(s string, form TimeForm, loc *time.Location) (at grant.Instant, fitted TimeForm, res time.Duration, f *fault) {
	if form == AnyTime {
		if form = guessForm(s); form == AnyTime {
			return 0, 0, 0, &fault{"time", short(s), "a time in one of the forms " + strings.Join(timeFormNames[1:], ", ") + "; state the form if it is one of them"}
		}
	}
	if unit, ok := numberUnits[form]; ok {
		n, res, ok := parseNumber(s, unit)
		if !ok {
			return 0, 0, 0, &fault{"time", short(s), fmt.Sprintf("%v: a number from 0 on, decimals allowed, no exponent, until the year 2262", form)}
		}
		return grant.Instant(n), form, res, nil
	}
	for _, layout := range layouts[form] {
		t, err := time.ParseInLocation(layout, s, loc)
		if err != nil {
			continue
		}
		if y := t.Year(); y < 1678 || y > 2261 {
			return 0, 0, 0, &fault{"time", short(s), "the years 1678 to 2261"}
		}
		return grant.Instant(t.UnixNano()), form, resolution(s), nil
	}
	return 0, 0, 0, &fault{"time", short(s), fmt.Sprintf("%v: %s", form, strings.Join(layouts[form], ", or "))}
}

func guessForm(s string) TimeForm {
	whole, _, _ := strings.Cut(s, ".")
	if whole != "" && strings.Trim(whole, "0123456789") == "" {
		switch len(whole) {
		case 9, 10:
			return UnixSeconds
		case 12, 13:
			return UnixMillis
		case 15, 16:
			return UnixMicros
		case 18, 19:
			return UnixNanos
		}
		return AnyTime
	}
	for _, form := range []TimeForm{RFC3339, DateTime, CombinedTime} {
		if slices.ContainsFunc(layouts[form], func(layout string) bool {
			_, err := time.Parse(layout, s)
			return err == nil
		}) {
			return form
		}
	}
	return AnyTime
}

// resolution is 1 s, or what the digits after the seconds resolve.
func resolution(s string) time.Duration {
	i := strings.LastIndexByte(s, ':')
	if z := strings.LastIndexAny(s, "+-"); z > len("2006-01-02") && i > z { // the colon of a zone
		i = strings.LastIndexByte(s[:z], ':')
	}
	res, digits := time.Second, false
	for _, b := range []byte(s[i+1:]) {
		switch {
		case b == '.' || b == ',':
			digits = true
		case b < '0' || b > '9':
			return res
		case digits && res > 1:
			res /= 10
		}
	}
	return res
}

// parseNumber is a decimal number of units in ns, cut to whole ns, and its
// resolution. Exact: no float.
func parseNumber(s string, unit time.Duration) (ns int64, res time.Duration, ok bool) {
	whole, decimals, point := strings.Cut(s, ".")
	if whole == "" || point && decimals == "" {
		return 0, 0, false
	}
	for _, b := range []byte(whole) {
		if b < '0' || b > '9' || ns > (math.MaxInt64-int64(b-'0'))/10 {
			return 0, 0, false
		}
		ns = ns*10 + int64(b-'0')
	}
	if unit != 1 && ns > math.MaxInt64/int64(unit)-1 {
		return 0, 0, false
	}
	ns *= int64(unit)
	res = unit
	for _, b := range []byte(decimals) {
		if b < '0' || b > '9' {
			return 0, 0, false
		}
		if res > 1 {
			res /= 10
			ns += int64(b-'0') * int64(res)
		}
	}
	return ns, res, true
}
