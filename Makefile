# `make` lists the targets. Each does the set-up it needs, and changes nothing outside .venv and
# .venv-peers, except that it installs a missing Java (and, for tests, PostgreSQL) with apt if it is
# allowed to.

.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?= python3
export PYTHON

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --constraint constraints.txt
PEERS := bench/penstock_bench/peers/requirements.txt
JOBS ?= 2

.PHONY: help setup demo test unit lint fix docs bench chaos proto upgrade clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

# --- set-up ----------------------------------------------------------------------------------

.venv/runtime: pyproject.toml constraints.txt
	@scripts/ensure-venv
	@echo "installing Penstock and its dependencies into .venv" >&2
	@$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/runtime
	@echo "installing tools for tests and checks into .venv" >&2
	@$(INSTALL) -e '.[dev]'
	@touch $@

.venv/bench: .venv/runtime
	@echo "installing matplotlib for charts into .venv" >&2
	@$(INSTALL) -e '.[bench]'
	@touch $@

# The benchmarks' peers have a virtual environment of their own; they are not dependencies.
.venv-peers/installed: $(PEERS) | .venv/runtime
	@echo "installing the benchmarks' peers into .venv-peers" >&2
	@$(BIN)/python -m venv .venv-peers
	@.venv-peers/bin/pip --disable-pip-version-check --quiet install -r $(PEERS)
	@touch $@

# An archive of its classes halves the start of Spark; it also starts without one.
.venv/prepared: .venv/runtime
	@scripts/ensure-java
	@$(BIN)/penstock prepare >&2 || true
	@touch $@

setup: .venv/runtime .venv/prepared ## install everything; the command is then .venv/bin/penstock

# --- use -------------------------------------------------------------------------------------

demo: setup ## run the demo: sample documents, through collections, into tables
	@$(BIN)/penstock demo demo

bench: setup .venv/bench .venv-peers/installed ## run the benchmarks (QUICK=1: a few minutes each; ONLY="latency crash")
	@scripts/ensure-postgres
	@$(BIN)/penstock bench $(ONLY) $(if $(QUICK),--quick) --peers .venv-peers/bin/python

# --- develop ---------------------------------------------------------------------------------

test: setup .venv/dev lint ## everything: lint, types, imports, and the whole test suite
	@scripts/ensure-postgres
	@$(BIN)/pytest -q -n $(JOBS) --dist loadfile $(ARGS)

# Tests that need neither Spark nor a database server: decisions, algebras, catalogs.
UNIT := tests/model tests/catalog tests/native tests/servicekit tests/shuffle tests/runtime
unit: .venv/dev ## the quick inner loop: no Spark, no PostgreSQL, no lint
	@HYPOTHESIS_PROFILE=quick $(BIN)/pytest -q -n $(JOBS) --dist loadfile \
		-m 'not spark and not postgres and not chaos and not slow' $(UNIT) $(ARGS)

lint: .venv/dev ## format, lint, types, imports, spelling
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/codespell src docs scripts *.md

fix: .venv/dev ## fix what the formatter and the linter can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: .venv/dev ## write the generated parts of docs/ (the tests say when they are stale)
	@PYTHONPATH=scripts $(BIN)/python -m penstock_docs

SOAK := tests/chaos/test_cluster_soak.py
chaos: setup .venv/dev ## the long runs: kill -9, paused processes, cut connections (SECONDS=60 each; a cluster: 600)
	@scripts/ensure-postgres
	@PENSTOCK_CHAOS_SECONDS=$(or $(SECONDS),60) HYPOTHESIS_PROFILE=night $(BIN)/pytest -q -m chaos --timeout 7200 \
		--ignore $(SOAK) $(ARGS)
	@PENSTOCK_CHAOS_SECONDS=$(or $(SECONDS),600) $(BIN)/pytest -q --timeout 7200 $(SOAK) $(ARGS)

proto: .venv/dev ## generate the protocol code
	@$(BIN)/python scripts/generate_protocols.py

upgrade: .venv/dev ## take the newest libraries that pyproject.toml allows, and write them down
	@$(PIP) install --upgrade --upgrade-strategy eager -e '.[dev]'
	@(sed -n '/^#/p' constraints.txt; $(BIN)/pip freeze --exclude-editable) > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove .venv, .venv-peers and the output of runs
	@rm -rf .venv .venv-peers demo .penstock build dist
