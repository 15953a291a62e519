# `make help` lists the targets. Only make and Python 3.10 or newer have to be there.
#
#   make setup PYTHON=python3.12                          another interpreter
#   make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#                                                         torch without CUDA, a smaller download
#   make test WORKERS=8                                   more test processes

PYTHON  ?= python3
WORKERS ?= 2

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt

# Written last, so that a failed installation leaves none and is tried again.
SETUP_STAMP := $(VENV)/.stamp-setup
DEMO_STAMP  := $(VENV)/.stamp-demo
PINS        := pyproject.toml constraints.txt

# One thread per test process: the tensors are small, and the processes already fill the cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal

# Any Chromium or Chrome will do; to install Debian's one has to be root, or may become it.
CHROMIUM := command -v chromium || command -v chromium-browser || command -v google-chrome
CHROMIUM := { $(CHROMIUM); } >/dev/null
ROOT     := $(shell test "$$(id -u)" = 0 || echo sudo)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all test-browser matrix study evidence docs figures dist lint format \
        bench clean

help: ## print this list
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | \
	  while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

# The last file `venv` writes that we need: missing if the machine's Python comes without ensurepip.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "seht needs Python 3.10 or newer; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv --clear $(VENV)

# A complete set-up is also all that the demo needs, hence both stamps.
$(SETUP_STAMP): $(PINS) | $(VENV)/bin/pip
	@echo "Installing seht with every extra (torch is large: minutes, the first time) ..."
	@$(PIP) -e '.[lab,finetune,ray,docs,dev]'
	@$(PIP) --no-deps 'aeon; python_version >= "3.11"' # its files are all that is read
	@touch $(DEMO_STAMP) $@

$(DEMO_STAMP): $(PINS) | $(VENV)/bin/pip
	@echo "Installing seht with what the demo needs (torch is large: minutes, the first time) ..."
	@$(PIP) -e '.[lab]'
	@touch $@

setup: $(SETUP_STAMP) ## create .venv with every extra; nothing when it is up to date

demo: $(DEMO_STAMP) ## wrong labels on scikit-learn's digits, 5 seeds: table, page, figure (minutes)
	@$(PY) -m seht compare --preset demo --seeds 5 --curve true --jobs $(WORKERS) --out runs/demo
	@$(PY) scripts/figures/memorising.py runs/demo runs/demo/memorising.svg

test: lint ## set-up, linters, types and the fast tests (minutes)
	$(PYTEST) -m "not slow and not browser"

test-all: lint ## the same with the long tests (under an hour)
	SEHT_TESTS=all $(PYTEST) -m "not browser"

test-browser: $(SETUP_STAMP) ## the report's page in headless Chromium (installs Debian's where there is none)
	@$(CHROMIUM) || { echo "Installing chromium ..."; $(ROOT) apt-get -qq update && \
	  $(ROOT) apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || \
	  { echo "no Chromium: install it or Chrome, and try again" >&2; exit 1; }
	$(PYTEST) -m browser

matrix: $(SETUP_STAMP) ## run the tests that speak of support, write docs/support.md (minutes)
	$(PYTEST) -m supports --matrix=docs/support.md

study: $(SETUP_STAMP) ## run a part of the study, TASK=digits-noisy; goes on where it was stopped (hours)
	$(PY) studies/run.py $(TASK) $(STUDY)

evidence: $(SETUP_STAMP) ## draw the tables and figures of docs/evidence again from results/evidence
	$(PY) studies/draw.py

docs: $(SETUP_STAMP) ## build the site into site/, strictly; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

figures: $(SETUP_STAMP) ## draw the pictures of the documentation again (minutes)
	@set -e; for script in logo architecture frozen_decisions two_minima weight cost_variance; do \
	  echo "== $$script"; $(PY) scripts/figures/$$script.py; done

dist: $(SETUP_STAMP) ## the wheel and the source distribution, into dist/
	$(PY) -m build --quiet

lint: $(SETUP_STAMP) ## ruff and mypy, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(SETUP_STAMP) ## let ruff fix and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(SETUP_STAMP) ## run every script in benchmarks/
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(PY) "$$script"; done

clean: ## remove caches and build products, but not .venv
	@rm -rf build dist site src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
