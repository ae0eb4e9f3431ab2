# Development of ddpdoctor. `make demo` and `make test` need nothing but Python (3.11 or newer) and make.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed
EVERYTHING := .venv-all

.PHONY: demo test test-all test-slow check bench exam fuzz mutate net sweep docs gallery clean

demo: $(INSTALLED)  ## a real two-rank job with a planted fault, recorded and diagnosed
	$(BIN)/ddpdoctor demo

test: $(INSTALLED)  ## before a commit, in minutes; what needs a GPU or an optional package skips itself
	$(BIN)/python -m tests.suite quick $(ARGUMENTS)

test-all: $(EVERYTHING)/.installed  ## all tests but the nightly ones, with all the packages that tests meet; TIER=rest leaves out what make test runs
	$(EVERYTHING)/bin/python -m tests.suite $(or $(TIER),all) $(ARGUMENTS)

test-slow: $(EVERYTHING)/.installed  ## the nightly tests: long sweeps, and each further kind of real job
	$(EVERYTHING)/bin/python -m tests.suite slow $(ARGUMENTS)

check: $(INSTALLED)  ## lint, format, types, layers, words, generated documentation and the site with its links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_vocabulary.py

bench: $(INSTALLED)  ## what the recording and the analysis cost
	set -e; for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(BIN)/python "$$benchmark"; done

exam: $(INSTALLED)  ## jobs and GPU traces with faults, marked by rule, rank, line and price; ARGUMENTS="--seed 7 --generated 500", or "--each" for each kind
	$(BIN)/python -m tests.exam $(ARGUMENTS)

fuzz: $(INSTALLED)  ## ten thousand mutated files of every kind that is read, growth, metric clients; ARGUMENTS="--seed 7 --only report" chooses
	$(BIN)/python -m tests.fuzz $(ARGUMENTS)

mutate: $(INSTALLED)  ## plants 200 errors in the package and tells which of them make test catches; ARGUMENTS="--seed 7 --count 50"
	$(BIN)/python -m tests.mutate $(ARGUMENTS)

net: $(INSTALLED)  ## what the analysis says of frozen cases, compared place by place; ARGUMENTS="--only runs" chooses
	$(BIN)/python -m tests.net $(ARGUMENTS)

sweep: $(INSTALLED)  ## which answers change with a constant moved by 30 %; half an hour, ARGUMENTS="--quick" draws a tenth of the jobs
	$(BIN)/python -m tests.sweep $(ARGUMENTS)

docs: $(INSTALLED)  ## write the pages that follow from code and rules
	$(BIN)/python docs/generate.py

gallery: $(INSTALLED)  ## record the jobs of the documentation's gallery anew, with their reports and pictures; minutes, needs Chromium
	$(BIN)/python -m tests.gallery $(ARGUMENTS)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "ddpdoctor needs Python 3.11 or newer; name one with make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	$(BIN)/pip install -c constraints.txt -e '.[torch,dev]'
	touch $@

# Where a package cannot be had there is no stamp: the tests run without it, and the next call tries again.
$(EVERYTHING)/.installed: pyproject.toml constraints.txt constraints-all.txt tests/everything.py
	@test -n "$(PYTHON)" || { echo "ddpdoctor needs Python 3.11 or newer; name one with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) tests/everything.py $(EVERYTHING)

clean:  ## all that make and the demo wrote here
	rm -rf .venv $(EVERYTHING) build dist ddpdoctor-runs fuzz-failures .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
