# Needs Go and make, nothing else; only race needs a C compiler too.

BIN      := bin
COMMANDS := stipend stipend-authority stipend-agent
FUZZTIME ?= 10s
ARGS     ?=

# One set of flags for every target, so that all share one build cache. Without
# cgo no C compiler is needed, and binaries run on any Linux.
export CGO_ENABLED := 0
export GOFLAGS     := -trimpath -tags=pebblegozstd $(GOFLAGS)

.DEFAULT_GOAL := help
.PHONY: help check fmt-check vet staticcheck structure test race fuzz bench microbench gen gen-check build demo sim grants-million clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)$$/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name what; do \
		printf '  make %-15s %s\n' "$$name" "$$what"; done

check: fmt-check vet staticcheck gen-check structure ## everything but tests: format, vet, staticcheck, generated code, structure rules

fmt-check:
	@out="$$(gofmt -l .)"; test -z "$$out" || { printf 'not gofmt clean:\n%s\n' "$$out"; exit 1; }

vet:
	go vet ./...
	go -C .ci/tools vet ./...

staticcheck:
	go -C .ci/tools build -o ../../$(BIN)/tools/ honnef.co/go/tools/cmd/staticcheck
	$(BIN)/tools/staticcheck ./...

structure: # who may import whom, and the rules for files
	go test -count=1 ./cmd/internal/structure

test: ## every test, as go test ./...
	go test -timeout 15m ./...

race: ## tests under the race detector, long ones shortened; needs a C compiler
	CGO_ENABLED=1 go test -race -short -timeout 30m ./...

fuzz: ## run each fuzz target for FUZZTIME (10s)
	@grep -rH --include='*_test.go' -o '^func Fuzz[A-Za-z0-9_]*' . | sort | while IFS=: read -r file name; do \
		name="$${name#func }"; echo "$$(dirname "$$file") $$name"; \
		go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")" || exit 1; done

bench: ## ratios to what users would take instead, in one run (ARGS="-only checks"); see docs/benchmarks.md
	go run ./cmd/internal/versus $(ARGS)

microbench: ## every benchmark, one package after another
	go test -p 1 -run '^$$' -bench . -benchmem -timeout 60m ./...

gen: ## write the Go code of the .proto files
	go -C .ci/tools run ./gen -root ../..

gen-check: ## fail when the generated code is not current
	go -C .ci/tools run ./gen -root ../.. -check

build: ## the three binaries, into bin/
	@.ci/build $(BIN) $(COMMANDS)

demo: build ## authority, three agents, a hot tenant, a crash, and the verdict (ARGS="--trace FILE")
	@$(BIN)/stipend demo $(ARGS)

sim: ## the simulated world: seeded faults in virtual time
	go test -count=1 -timeout 15m ./sim/...

grants-million: ## 1,000,000 grants over a bad network: nothing deducted or credited twice
	go test ./sim -run TestMillionGrants -count=1 -v -timeout 30m -grants=1000000

clean: ## remove bin/
	rm -rf $(BIN)
