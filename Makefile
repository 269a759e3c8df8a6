# The first target that needs it builds .venv; later ones reuse it until pyproject.toml changes.
# Another interpreter: make setup PYTHON=/path/to/python

VENV := .venv
BIN := $(VENV)/bin

# The first interpreter that runs, is new enough and can make environments. A name on PATH is not
# proof: version managers put names there that only work for the version in force.
PYTHONS := python3 python python3.14 python3.13 python3.12 python3.11
PYTHON_CHECK := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in $(PYTHONS); do \
	"$$each" -c '$(PYTHON_CHECK)' >/dev/null 2>&1 && echo "$$each" && break; done)

# Runs what follows with a store of its own, never the user's.
TEMPORARY_STORE := store=$$(mktemp -d) || exit 1; trap 'rm -rf "$$store"' EXIT; \
	AUTOBATCH_CACHE_DIR="$$store"; export AUTOBATCH_CACHE_DIR;

.PHONY: help setup test lint format demo docs bench wheel clean

help:
	@echo "make setup    build $(VENV) (the others do so by themselves)"
	@echo "make demo     three functions tuned, then the same from the record"
	@echo "make test     run the tests"
	@echo "make lint     check format, style and types"
	@echo "make format   format, and mend what can be mended"
	@echo "make docs     write docs/cli.md from the command"
	@echo "make bench    run every benchmark, one table each"
	@echo "make wheel    build the wheel into dist/"
	@echo "make clean    remove all that the others made"

setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found: give PYTHON=..." >&2; exit 1; }
	@echo "Building $(VENV): this takes a minute, once."
	@$(BIN)/python -c '$(PYTHON_CHECK)' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.lint $(VENV)/.bench: $(VENV)/.%: $(VENV)/.setup
	@$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

test: $(VENV)/.setup
	$(BIN)/pytest --numprocesses auto

lint: $(VENV)/.lint
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/.lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(VENV)/.setup
	@$(TEMPORARY_STORE) $(BIN)/autobatch demo

docs: $(VENV)/.setup
	@$(BIN)/python docs/generate_cli.py

bench: $(VENV)/.bench
	@set -e; $(TEMPORARY_STORE) \
	for each in benchmarks/bench_*.py; do echo "== $$each"; $(BIN)/python "$$each"; done

wheel: $(VENV)/.setup
	@rm -rf dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) dist .hypothesis .pytest_cache .ruff_cache
	find autobatch tests benchmarks examples docs -name __pycache__ -prune -exec rm -rf {} +
