# Every target makes what it needs, `.venv` included. Wanted on the machine: git, make, Python 3.11 or
# newer with venv, and a C compiler (the tests build a small stand-in for the GPU driver's library).
# With `uv` on the PATH the environment is made by uv, else by venv and pip.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

# The first of these that is new enough makes the environment; `make PYTHON=/path/to/python` overrides.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell \
	command -v $(p) >/dev/null 2>&1 && $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# More for pytest: make test ARGS="tests/unit -k audit"
ARGS ?=
DEV_REQUIREMENTS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")

# Folder with the public openb trace; without it the placement benchmark is left out of `make bench`.
TRACES ?=
BENCHES := $(patsubst bench/bench_%.py,bench-%,$(wildcard bench/bench_*.py))

.PHONY: help demo up test soak mutants check format schema bench bench-bus bench-placement $(BENCHES) venv clean

help:  ## this list
	@printf 'Rigbook: who owns which GPU, since when, why, and whether that is still true.\n\n'
	@sed -n 's/^\([a-z][a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22
	@for b in $(BENCHES); do printf '  make %s\n' "$$b"; done

demo: $(STAMP)  ## a whole cell with simulated cards: fills up, a leftover is seen and healed (no GPU, no Docker)
	@$(BIN)/rigbook demo

up: $(STAMP)  ## bus, ledger, placer, reaper and a node with simulated cards; Ctrl-C ends all
	@$(BIN)/rigbook up $(ARGS)

test: $(STAMP)  ## all tests: unit, contract, simulation, e2e, acceptance
	@$(BIN)/python -m pytest $(ARGS)

# A number of worlds from 0, or FIRST:END. Stops at the first that fails, with the command that shows it again.
SEEDS ?= 20000

soak: $(STAMP)  ## the whole system simulated under faults, for long: make soak SEEDS=100000:200000
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

mutants: $(STAMP)  ## known mistakes planted into the core: the simulation and the tests must catch each
	@$(BIN)/python -m tests.simulation.mutants $(ARGS)

check: $(STAMP)  ## ruff, formatting, mypy, pyright, import contracts
	@set -e; step() { printf -- '-- %s\n' "$$*"; "$$@"; }; \
	step $(BIN)/ruff check .; \
	step $(BIN)/ruff format --check .; \
	step $(BIN)/mypy; \
	step $(BIN)/pyright; \
	step $(BIN)/lint-imports --no-cache

format: $(STAMP)  ## put the code into the house's format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

schema: $(STAMP)  ## write schemas/documents (JSON Schemas, AsyncAPI) from the types
	@$(BIN)/python -m rigbook_schemas.documents schemas/documents

bench: $(BENCHES) bench-bus $(if $(TRACES),bench-placement)  ## every figure in bench/, one after the other

$(BENCHES): bench-%: $(STAMP)
	@printf -- '-- %s\n' "$@"; $(BIN)/python bench/bench_$*.py $(ARGS)

bench-bus: $(STAMP)  ## appends and reads per second, on a real server and in memory
	@printf -- '-- %s\n' "$@"; $(BIN)/python bench/bus_read.py $(ARGS)

bench-placement: $(STAMP)  ## the published policies and ours on the openb trace: make bench-placement TRACES=DIR
	@test -n "$(TRACES)" || { echo "name the folder of the openb trace: make bench-placement TRACES=DIR" >&2; exit 2; }
	@printf -- '-- %s\n' "$@"; $(BIN)/python bench/placement "$(TRACES)" $(ARGS)

venv: $(STAMP)  ## only make .venv

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# One install, again only when pyproject.toml changes. pip before 25.1 knows no dependency groups, so the
# group is read out of pyproject.toml by Python itself: one list for uv, pip and people.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer on the PATH; name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@test ! -e $(BIN)/python || $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || rm -rf $(VENV)
	@if command -v uv >/dev/null 2>&1; then \
	  set -e; \
	  test -x $(BIN)/python || { echo "-- making $(VENV) (uv)"; uv venv --python "$(PYTHON)" $(VENV); }; \
	  $(BIN)/python -c '$(DEV_REQUIREMENTS)' > $(VENV)/dev-requirements.txt; \
	  echo "-- installing rigbook and its tools into $(VENV) (uv)"; \
	  uv pip install --python $(BIN)/python -e '.[all]' -r $(VENV)/dev-requirements.txt; \
	else \
	  set -e -o pipefail; \
	  test -x $(BIN)/pip || { echo "-- making $(VENV) ($(PYTHON) -m venv)"; \
	    $(PYTHON) -m venv $(VENV) || { echo "this Python cannot make environments; on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 2; }; }; \
	  $(BIN)/python -c '$(DEV_REQUIREMENTS)' > $(VENV)/dev-requirements.txt; \
	  echo "-- installing rigbook and its tools into $(VENV) (pip; about a minute the first time)"; \
	  $(BIN)/pip install --disable-pip-version-check --progress-bar off -e '.[all]' -r $(VENV)/dev-requirements.txt \
	    2> >(grep -v '^WARNING: Location' >&2) | { grep --line-buffered -E '^(Collecting|Building|Installing|Successfully|ERROR)' || true; }; \
	fi
	@touch $@
