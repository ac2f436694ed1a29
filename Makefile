# `make` alone lists the targets. Everything a target needs, it sets up first; nothing but Python and make is assumed.

PYTHON ?= python3
# More test processes than cores: half of the time they wait for others, and for time to pass.
WORKERS ?= 4
UV := .tools/bin/uv
PY := .venv/bin/python
BENCH_PY := .venv-bench/bin/python

# uv brings its own certificates unless told to trust the machine's, and never fetches an interpreter of its own here.
export UV_SYSTEM_CERTS ?= 1
export UV_PYTHON_DOWNLOADS ?= never
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
export PIP_ROOT_USER_ACTION ?= ignore
# The tests start a thousand processes: with this set, each of them would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

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
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "$(PYTHON) has no pip; on Debian: apt-get install python3-pip" >&2; exit 1; }
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

.PHONY: system
system: ## install the system packages the tests need (as root), or print how to
	@scripts/system_packages.sh

# --- use --------------------------------------------------------------------------------------------------------------

.PHONY: run
run: setup ## open a yard with its examples
	.venv/bin/taskyard demo

.PHONY: test
test: setup system ## run the whole suite; ARGS="-k name" narrows it
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: check
check: setup ## lint, format, types, layers, and what may not be in the tree
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	$(PY) scripts/check_tree.py

.PHONY: spec
spec: setup system ## run the tests and report on every row of docs/SPEC.md
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -p scripts.spec_report $(ARGS)

.PHONY: bench
bench: .venv-bench/.stamp ## measure taskyard and its peers side by side
	$(BENCH_PY) -m benchmarks $(ARGS)

.PHONY: torture
torture: setup system ## break promises on purpose; FULL=1 for the full counts
	FULL=$(FULL) $(PY) -m tests.torture $(ARGS)

# --- upkeep -----------------------------------------------------------------------------------------------------------

.PHONY: fmt
fmt: setup ## format, and mend what the linter can mend
	.venv/bin/ruff check --fix-only
	.venv/bin/ruff format

.PHONY: seal
seal: setup ## write the checksums of the SQL after it changed; RELEASED=1 once there is a release
	$(PY) scripts/seal_sql.py $(if $(RELEASED),--released)

COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	$(if $(UPGRADE),--upgrade)

.PHONY: lock
lock: .tools/.stamp ## recompile the pins; UPGRADE=1 takes the newest of everything
	$(COMPILE) --output-file requirements/uv.txt requirements/uv.in
	$(COMPILE) --output-file requirements/base.txt pyproject.toml
	$(COMPILE) --constraint requirements/base.txt --output-file requirements/dev.txt --all-extras pyproject.toml requirements/dev.in
	$(COMPILE) --constraint requirements/base.txt --output-file requirements/bench.txt --all-extras pyproject.toml requirements/bench.in

.PHONY: clean
clean: ## remove environments, caches and builds
	rm -rf .tools .venv .venv-bench .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +
