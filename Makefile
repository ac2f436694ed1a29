# `make` alone lists the targets. Everything a target needs, it sets up first; nothing but Python and make is assumed.

PYTHON ?= python3
UV := .tools/bin/uv
PY := .venv/bin/python
BENCH_PY := .venv-bench/bin/python

# uv brings its own certificates unless told to trust the machine's, and never fetches an interpreter of its own here.
export UV_SYSTEM_CERTS ?= 1
export UV_PYTHON_DOWNLOADS ?= never
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
export PIP_ROOT_USER_ACTION ?= ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environments -----------------------------------------------------------------------------------------------------
# One stamp per environment, newer than the pins it was made from: the second `make setup` has nothing to do. When pins
# change the environment is updated in place, so that whatever runs in it meanwhile keeps its interpreter.

.PHONY: setup
setup: .venv/.stamp ## make .venv with everything for running, testing and checking

.tools/.stamp: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "taskyard needs Python 3.11 or newer: make PYTHON=python3.11")'
	rm -rf .tools
	$(PYTHON) -m pip install --quiet --target .tools --require-hashes --requirement requirements/uv.txt
	@touch $@

.venv/.stamp: .tools/.stamp requirements/dev.txt pyproject.toml
	@$(PY) -c '' 2>/dev/null || $(UV) venv --quiet --clear --python $(PYTHON) .venv
	$(UV) pip install --quiet --python $(PY) --require-hashes --requirement requirements/dev.txt
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	@touch $@

.venv-bench/.stamp: .tools/.stamp requirements/bench.txt pyproject.toml
	@$(BENCH_PY) -c '' 2>/dev/null || $(UV) venv --quiet --clear --python $(PYTHON) .venv-bench
	$(UV) pip install --quiet --python $(BENCH_PY) --require-hashes --requirement requirements/bench.txt
	$(UV) pip install --quiet --python $(BENCH_PY) --no-deps --no-build-isolation --editable .
	@touch $@
