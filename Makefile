PYTHON ?= python

.PHONY: check lint types sizes test test-all golden

check: lint types sizes test

lint:
	$(PYTHON) -m ruff check src tests benchmarks

types:
	$(PYTHON) -m mypy

# Code lines a folder; tests/test_layers_guard.py holds the limits.
sizes:
	@for folder in src/soloist/*/; do printf '%7d %s\n' "$$(cat $$(find $$folder -name '*.py') /dev/null | grep -cvE '^\s*(#|$$)')" "$$folder"; done

test:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "not gpu and not weights and not slow"

# With every schema, width and restart: half an hour.
test-all:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "not gpu and not weights"

# Needs the extra `oracle`.
golden:
	PYTHONPATH=src $(PYTHON) -m tests.golden.make_golden
