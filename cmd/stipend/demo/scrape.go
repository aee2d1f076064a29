package demo

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// sample is one line of a metrics page.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

// samples is one process's metrics page.
type samples []sample

// maxPage bounds a metrics page in bytes.
const maxPage = 8 << 20

// scrape reads a metrics page in the text format of Prometheus.
func scrape(ctx context.Context, url string) (samples, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return parseSamples(io.LimitReader(resp.Body, maxPage))
}

func parseSamples(r io.Reader) (samples, error) {
	var out samples
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		s := strings.TrimSpace(lines.Text())
		if s == "" || s[0] == '#' {
			continue
		}
		one, err := parseSample(s)
		if err != nil {
			return nil, fmt.Errorf("metrics: %q: %w", s, err)
		}
		out = append(out, one)
	}
	return out, lines.Err()
}

func parseSample(s string) (sample, error) {
	one := sample{labels: map[string]string{}}
	i := strings.IndexAny(s, "{ ")
	if i < 0 {
		return one, fmt.Errorf("has no value")
	}
	one.name, s = s[:i], s[i:]
	if s[0] == '{' {
		s = s[1:]
		for !strings.HasPrefix(s, "}") {
			name, rest, ok := strings.Cut(s, "=")
			if !ok {
				return one, fmt.Errorf("has a label without a value")
			}
			q, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return one, fmt.Errorf("label %s: %w", name, err)
			}
			value, err := strconv.Unquote(q)
			if err != nil {
				return one, fmt.Errorf("label %s: %w", name, err)
			}
			one.labels[name] = value
			s = strings.TrimPrefix(rest[len(q):], ",")
		}
		s = s[1:]
	}
	word, _, _ := strings.Cut(strings.TrimSpace(s), " ")
	var err error
	one.value, err = strconv.ParseFloat(word, 64)
	return one, err
}

// sum adds all samples of the name whose labels have the values given, as
// name, value, name, value.
func (list samples) sum(name string, labels ...string) (total float64) {
	for _, s := range list {
		if s.name != name {
			continue
		}
		fits := true
		for i := 0; i+1 < len(labels); i += 2 {
			fits = fits && s.labels[labels[i]] == labels[i+1]
		}
		if fits {
			total += s.value
		}
	}
	return total
}

// spread is a histogram of seconds: counts up to and including each bound.
type spread struct {
	bounds []float64
	counts []float64 // cumulative
}

// histogram adds up all buckets of the name that fit.
func (list samples) histogram(name string, labels ...string) spread {
	at := map[float64]float64{}
	for _, s := range list {
		if s.name != name+"_bucket" {
			continue
		}
		fits := true
		for i := 0; i+1 < len(labels); i += 2 {
			fits = fits && s.labels[labels[i]] == labels[i+1]
		}
		bound, err := strconv.ParseFloat(s.labels["le"], 64)
		if !fits || err != nil {
			continue
		}
		at[bound] += s.value
	}
	var out spread
	for b := range at {
		out.bounds = append(out.bounds, b)
	}
	slices.Sort(out.bounds)
	for _, b := range out.bounds {
		out.counts = append(out.counts, at[b])
	}
	return out
}

// quantile is the bound of the bucket that the share q of all falls into: the
// true value is at most that.
func (s spread) quantile(q float64) (at time.Duration, ok bool) {
	if len(s.counts) == 0 || s.counts[len(s.counts)-1] == 0 {
		return 0, false
	}
	want := q * s.counts[len(s.counts)-1]
	for i, n := range s.counts {
		if n >= want {
			if math.IsInf(s.bounds[i], 1) {
				return time.Duration(s.bounds[max(i-1, 0)] * 1e9), true
			}
			return time.Duration(math.Round(s.bounds[i] * 1e9)), true
		}
	}
	return 0, false
}
