package conf

import (
	"encoding"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/stipend/stipend/proto/grant"
)

// fault is what is wrong with a text, and what to do.
type fault struct{ what, do string }

func (f *fault) Error() string { return f.what + "; " + f.do }

// ParseRate reads "100/s", "10 per 30s", "600 per 1m" or "0", exactly. Units
// are whole, 0 to MaxUnits; a period is a duration of at least 1 ns. Only zero
// may go without a period.
func ParseRate(s string) (grant.Rate, error) {
	units, period, found := strings.Cut(s, "/")
	if !found {
		units, period, found = strings.Cut(s, "per")
	}
	units, period = strings.TrimSpace(units), strings.TrimSpace(period)
	if strings.ContainsAny(units, ".eE") && isNumber(units) {
		return grant.Rate{}, &fault{quote(s) + " has a fraction of a unit", "choose a longer period instead: 3 per 2s, not 1.5/s"}
	}
	n, err := parseInt(units, 0, math.MaxInt64)
	if err != nil {
		var f *fault
		if errors.As(err, &f) && isNumber(units) {
			return grant.Rate{}, f
		}
		return grant.Rate{}, &fault{quote(s) + " is no rate", "write units and a period: 100/s or 600 per 1m"}
	}
	if !found || period == "" {
		if n == 0 && !found {
			return grant.Rate{}, nil
		}
		return grant.Rate{}, &fault{quote(s) + " has no period", fmt.Sprintf("write %d/s or %d per 1m", n, n)}
	}
	if first := period[0]; first < '0' || first > '9' {
		period = "1" + period
	}
	per, err := ParseDuration(period)
	if err != nil {
		return grant.Rate{}, err
	}
	if per <= 0 {
		return grant.Rate{}, &fault{quote(s) + " has a period of nothing", "write a period of at least 1ns"}
	}
	return grant.Rate{Units: grant.Units(n), Per: per}, nil
}

// FormatRate writes what ParseRate reads.
func FormatRate(r grant.Rate) string {
	switch {
	case r == grant.Rate{}:
		return "0"
	case r.Per == time.Second:
		return fmt.Sprintf("%d/s", r.Units)
	}
	return fmt.Sprintf("%d per %s", r.Units, FormatDuration(r.Per))
}

// ParseDuration reads a duration with its unit, 0 or more: "5s", "1m30s",
// "250ms". Zero needs no unit.
func ParseDuration(s string) (time.Duration, error) {
	if n, err := strconv.ParseFloat(s, 64); err == nil && n != 0 {
		return 0, &fault{quote(s) + " has no unit", fmt.Sprintf("write %ss, %sms or another unit", s, s)}
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, &fault{quote(s) + " is no duration", "write a number and a unit of ns, us, ms, s, m or h: 5s, 250ms, 1h30m"}
	}
	if d < 0 {
		return 0, &fault{quote(s) + " is negative", "write a duration of 0 or more"}
	}
	return d, nil
}

// FormatDuration writes what ParseDuration reads: 1m, not 1m0s.
func FormatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func isNumber(s string) bool {
	_, err := strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), 64)
	return err == nil || errors.Is(err, strconv.ErrRange)
}

// parseInt reads a whole decimal number. YAML would take 010 for eight and cut
// 1.5 down to 1.
func parseInt(s string, low, high int64) (int64, error) {
	digits := strings.TrimPrefix(s, "-")
	if len(digits) > 1 && digits[0] == '0' && isNumber(digits) && !strings.ContainsAny(digits, ".eE") {
		return 0, &fault{quote(s) + " has a leading zero", "write decimal digits without it"}
	}
	n, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange), err == nil && (n < low || n > high):
		return 0, &fault{s + " is out of range", fmt.Sprintf("allowed are %d to %d", low, high)}
	case err != nil && isNumber(s):
		return 0, &fault{quote(s) + " is not a whole number", "write decimal digits only"}
	case err != nil || strings.HasPrefix(digits, "_") || strings.HasSuffix(digits, "_"):
		return 0, &fault{quote(s) + " is no number", "write decimal digits only"}
	}
	return n, nil
}

var sizes = []struct {
	unit string
	size int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

func parseBytes(s string, low, high int64) (int64, error) {
	for _, one := range sizes {
		number, ok := strings.CutSuffix(s, one.unit)
		if !ok {
			continue
		}
		if number = strings.TrimSpace(number); isNumber(number) {
			n, err := parseInt(number, low/one.size, high/one.size)
			return n * one.size, err
		}
	}
	if !isNumber(s) {
		return 0, &fault{quote(s) + " is no size", "write a whole number of B, KiB, MiB, GiB or TiB: 64MiB"}
	}
	return parseInt(s, low, high)
}

func formatBytes(n int64) string {
	for _, one := range sizes[:4] {
		if n != 0 && n%one.size == 0 {
			return fmt.Sprintf("%d%s", n/one.size, one.unit)
		}
	}
	return strconv.FormatInt(n, 10)
}

// unlimited is the word for the largest value, where a field allows it.
const unlimited = "unlimited"

var unlimitedRate = grant.Rate{Units: grant.MaxUnits, Per: 1}

var (
	durationType = reflect.TypeFor[time.Duration]()
	rateType     = reflect.TypeFor[grant.Rate]()
	modeType     = reflect.TypeFor[grant.Mode]()
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// single reports whether values of the type are written as one scalar.
func single(t reflect.Type) bool {
	switch {
	case t == rateType, reflect.PointerTo(t).Implements(textType):
		return true
	}
	switch t.Kind() {
	case reflect.Bool, reflect.String, reflect.Float64, reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return true
	}
	return false
}

// setText sets a single value from text: of a scalar, a variable or a flag.
func setText(v reflect.Value, s string, o options) error {
	t := v.Type()
	if s == unlimited && t.Kind() != reflect.String {
		return setUnlimited(v, o)
	}
	switch {
	case t == durationType:
		d, err := ParseDuration(s)
		v.SetInt(int64(d))
		return err
	case t == rateType:
		rate, err := ParseRate(s)
		v.Set(reflect.ValueOf(rate))
		return err
	case t == modeType:
		mode, err := grant.ParseMode(s)
		if err != nil {
			return &fault{quote(s) + " is no mode", "allowed are enforce, shadow and off"}
		}
		v.SetUint(uint64(mode))
		return nil
	case reflect.PointerTo(t).Implements(textType):
		if err := v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s)); err != nil {
			return &fault{quote(s) + ": " + err.Error(), ""}
		}
		return nil
	}
	switch t.Kind() {
	case reflect.Bool:
		if s != "true" && s != "false" {
			return &fault{quote(s) + " is neither true nor false", "write one of them"}
		}
		v.SetBool(s == "true")
	case reflect.String:
		v.SetString(s)
	case reflect.Float64:
		f, err := strconv.ParseFloat(s, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			return &fault{quote(s) + " is no number", "write a decimal number"}
		}
		v.SetFloat(f)
	default:
		return setInt(v, s, o)
	}
	return nil
}

// intRange is what a value of the kind may be; unsigned values over MaxInt64
// cannot be configured.
func intRange(t reflect.Type) (low, high int64) {
	switch t.Kind() {
	case reflect.Uint, reflect.Uint64:
		return 0, math.MaxInt64
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		return 0, 1<<t.Bits() - 1
	}
	return -1 << (t.Bits() - 1), 1<<(t.Bits()-1) - 1
}

func setInt(v reflect.Value, s string, o options) error {
	low, high := intRange(v.Type())
	read := parseInt
	if o.bytes {
		read = parseBytes
	}
	n, err := read(s, low, high)
	if err != nil {
		return err
	}
	if v.CanUint() {
		v.SetUint(uint64(n))
	} else {
		v.SetInt(n)
	}
	return nil
}

func setUnlimited(v reflect.Value, o options) error {
	switch {
	case !o.unlimited:
		return &fault{"unlimited is not allowed here", "write a number; a policy with mode off lets every request pass"}
	case v.Type() == rateType:
		v.Set(reflect.ValueOf(unlimitedRate))
	case v.CanUint():
		_, high := intRange(v.Type())
		v.SetUint(uint64(high))
	case v.CanInt():
		_, high := intRange(v.Type())
		v.SetInt(high)
	}
	return nil
}

// text writes a single value in the form that setText reads.
func text(v reflect.Value, o options) string {
	t := v.Type()
	switch {
	case t == durationType:
		return FormatDuration(time.Duration(v.Int()))
	case t == rateType:
		rate := v.Interface().(grant.Rate)
		if o.unlimited && rate == unlimitedRate {
			return unlimited
		}
		return FormatRate(rate)
	case t == modeType:
		return grant.Mode(v.Uint()).String()
	case reflect.PointerTo(t).Implements(textType):
		if m, ok := v.Interface().(encoding.TextMarshaler); ok {
			raw, err := m.MarshalText()
			if err == nil {
				return string(raw)
			}
		}
		return fmt.Sprint(v.Interface())
	}
	switch {
	case v.CanInt() || v.CanUint():
		n := int64(0)
		if v.CanInt() {
			n = v.Int()
		} else {
			n = int64(v.Uint())
		}
		if _, high := intRange(t); o.unlimited && n == high {
			return unlimited
		}
		if o.bytes {
			return formatBytes(n)
		}
		return strconv.FormatInt(n, 10)
	case v.Kind() == reflect.Bool:
		return strconv.FormatBool(v.Bool())
	case v.Kind() == reflect.Float64:
		return strconv.FormatFloat(v.Float(), 'g', -1, 64)
	}
	return v.String()
}
