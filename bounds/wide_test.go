package bounds

import (
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

func drawWide(t *rapid.T, label string) wide {
	var w wide
	for i := range rapid.IntRange(0, 4).Draw(t, label+" words") {
		w[i] = rapid.SampledFrom([]uint64{0, 1, 1 << 63, 1<<64 - 1, rapid.Uint64().Draw(t, label)}).Draw(t, label+" word")
	}
	return w
}

func magnitude(w wide) wide {
	w[3] &^= 1 << 63
	return w
}

// Every operation gives what big.Int gives, or says that it overflowed exactly
// when the result leaves the 256 bits.
func TestWideAgreesWithBig(t *testing.T) {
	limit := new(big.Int).Lsh(big.NewInt(1), 255)
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawWide(t, "a"), drawWide(t, "b")
		p, q := magnitude(a), magnitude(b)
		u := rapid.Uint64().Draw(t, "u")
		for _, op := range []struct {
			name string
			got  func(*exact) wide
			want *big.Int
		}{
			{"add", func(x *exact) wide { return x.add(a, b) }, new(big.Int).Add(wideInt(a), wideInt(b))},
			{"sub", func(x *exact) wide { return x.sub(a, b) }, new(big.Int).Sub(wideInt(a), wideInt(b))},
			{"times", func(x *exact) wide { return x.times(p, u) }, new(big.Int).Mul(wideInt(p), new(big.Int).SetUint64(u))},
			{"mul", func(x *exact) wide { return x.mul(p, q) }, new(big.Int).Mul(wideInt(p), wideInt(q))},
		} {
			var x exact
			got := op.got(&x)
			fits := op.want.Cmp(limit) < 0 && op.want.Cmp(new(big.Int).Neg(limit)) >= 0
			if x.overflow == fits {
				t.Fatalf("%s: overflow %v, want %v", op.name, x.overflow, op.want)
			}
			if fits && wideInt(got).Cmp(op.want) != 0 {
				t.Fatalf("%s: %v, want %v", op.name, wideInt(got), op.want)
			}
		}
		if a.cmp(b) != wideInt(a).Cmp(wideInt(b)) {
			t.Fatal("cmp")
		}
		if q.zero() {
			return
		}
		quo, rest := p.divFloor(q)
		wantQ, wantR := new(big.Int).DivMod(wideInt(p), wideInt(q), new(big.Int))
		if wideInt(quo).Cmp(wantQ) != 0 || wideInt(rest).Cmp(wantR) != 0 {
			t.Fatalf("div: %v rest %v, want %v rest %v", wideInt(quo), wideInt(rest), wantQ, wantR)
		}
		if g := gcd(p, q); wideInt(g).Cmp(new(big.Int).GCD(nil, nil, wideInt(p), wideInt(q))) != 0 {
			t.Fatalf("gcd: %v", wideInt(g))
		}
		floor, ok := unitsFloor(a, q)
		wantF := new(big.Int).Div(wideInt(a), wideInt(q)) // Euclidean: floor for q > 0
		if a != (wide{0, 0, 0, 1 << 63}) && ok && wantF.Cmp(big.NewInt(int64(floor))) != 0 {
			t.Fatalf("unitsFloor: %v, want %v", floor, wantF)
		}
	})
}

// scale keeps the sign.
func TestScale(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(-1<<40, 1<<40).Draw(t, "n")
		f := rapid.Uint64Range(0, 1<<62).Draw(t, "f")
		var x exact
		a := wideOf(uint64(max(n, -n)))
		if n < 0 {
			a = x.sub(wide{}, a)
		}
		want := new(big.Int).Mul(big.NewInt(n), new(big.Int).SetUint64(f))
		if got := x.scale(a, wideOf(f)); x.overflow || wideInt(got).Cmp(want) != 0 {
			t.Fatalf("%v, want %v", wideInt(got), want)
		}
	})
}
