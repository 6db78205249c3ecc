# Every target works from a fresh clone: the first one run makes the environment in .venv.

PYTHON ?= python3
# Pinned so that pip takes one known build. The supported range is torch>=2.11,<2.16; to try another:
#   make setup TORCH=torch==2.15.0
# The choice is kept in .venv/.torch, so later targets stay with it. Or beside it: make versions.
VENV ?= .venv
CHOSEN := $(shell cat $(VENV)/.torch 2>/dev/null)
TORCH ?= $(or $(CHOSEN),torch==2.13.0)

# Files of tests that run at a time. Most tests start processes and wait for them, so that on two
# cores two files leave one core idle.
JOBS ?= 3

# What make versions tests with.
VERSIONS ?= 2.13.0 2.15.0

# The torch that make bench-peers measures with; another than this one in an environment of its own.
PEERS_TORCH ?= 2.13.0

# Compiled modules are kept: most tests start processes, and each would compile all it imports.
export PYTHONDONTWRITEBYTECODE =

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Modules are compiled when they are first imported; to compile all of them takes half a minute.
INSTALL := $(PIP) install --no-compile
SOURCES := $(wildcard src/paceline/_transport/*.c src/paceline/_transport/*.h)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-pinned gpu versions search slow sanitize wheel test-wheel programs check types docs chaos bench bench-peers integrations parity clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make the environment in .venv and build the C library

demo: $(READY) ## train a small model on all cores, and watch it
	$(BIN)/paceline demo

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-pinned: $(READY) ## run the tests with ranks on unequal cores: odd ranks on one each, even ones on all
	$(BIN)/python -m pytest --pinned -n $(JOBS) --dist loadfile --no-loadscope-reorder

gpu: $(READY) ## run the tests on this machine's GPUs, 2 and 4 ranks, over NCCL if it takes them
	$(BIN)/python -m tests.gpu

versions: ## run the tests with each torch of VERSIONS, in environments .venv-2.13.0 and so on
	@for version in $(VERSIONS); do \
	  $(MAKE) --no-print-directory setup VENV=.venv-$$version TORCH=torch==$$version || exit 1; done
	@$(PYTHON) tests/versions.py --jobs $(JOBS) $(if $(SAVE),--save $(SAVE)) $(VERSIONS) \
	  $(if $(TESTS),-- $(TESTS))

search: $(READY) ## run the tests that make up their examples, with others than the last time
	$(BIN)/python -m pytest -m "slow or not slow" --hypothesis-profile search \
	  $$(grep -rl "^from hypothesis" tests --include="test_*.py")

slow: $(READY) ## run the tests that train for minutes
	$(BIN)/python -m pytest -m slow

programs: $(READY) ## train five kinds of programs under torch and under paceline, and compare their losses
	$(BIN)/python -m pytest -m slow tests/programs

parity: $(READY) ## run PyTorch's own distributed tests on paceline
	$(BIN)/python -m tests.parity.runner

sanitize: ## run the C engine, threads as ranks, under the compiler's address and thread sanitizers
	tests/transport/engine/sanitize.sh build/sanitize

wheel: $(READY) ## build an sdist, and from it a wheel for this platform that needs no compiler, in dist/
	rm -rf dist && mkdir -p dist
	$(BIN)/python -c "import setuptools.build_meta as build; build.build_sdist('dist')" > /dev/null
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls dist/*-py3-none-manylinux_*.whl || { echo "the wheel has no library in it"; exit 1; }

test-wheel: wheel ## install the wheel and the sdist in a fresh environment outside the checkout, and try them
	$(BIN)/python tests/wheel.py --torch "$(TORCH)" dist

check: $(READY) ## check format, lint, types and the docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory --jobs 2 --output-sync types docs

types: $(READY)
	$(BIN)/mypy

docs: $(READY) ## build the docs site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

integrations: $(READY) ## install Accelerate, transformers and Lightning, and test with them
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --no-build-isolation -e ".[integrations]"
	$(BIN)/python -m pytest tests/integrations tests/test_examples.py

bench-peers: $(READY) ## install the peers in .venv-peers and measure all of them in one table
	PEERS_TORCH=$(PEERS_TORCH) $(BIN)/python benchmarks/peers_setup.py
	.venv-peers$(patsubst %,-%,$(filter-out 2.13.0,$(PEERS_TORCH)))/bin/python benchmarks/peers.py

chaos: $(READY) ## kill and stop ranks while they train, and compare the weights; FAULTS=, ENGINES= and MANY= choose
	$(BIN)/python benchmarks/chaos.py $(if $(ENGINES),--engines $(ENGINES)) $(if $(FAULTS),--faults $(FAULTS)) $(if $(MANY),--many $(MANY))
	$(if $(FAULTS)$(ENGINES)$(MANY),,$(BIN)/python benchmarks/chaos_hosts.py)

bench: $(READY) ## measure collectives and training steps against torch's
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/step.py

clean: ## remove the environment and everything built
	rm -rf .venv .venv-* build dist src/*.egg-info src/paceline/_transport/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(TORCH),$(CHOSEN))
.PHONY: $(READY)
endif
# Made without a compiler, and there is one now.
ifeq ($(wildcard src/paceline/_transport/_shm.so),)
ifneq ($(shell command -v gcc || command -v cc),)
.PHONY: $(READY)
endif
endif

# torch comes first and the package is built without isolation, so torch is fetched once. Some
# versions of torch want setuptools below 82.
$(READY): pyproject.toml setup.py $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) "setuptools>=77,<82" wheel
	$(INSTALL) --no-build-isolation -e ".[dev]"
	@test -e src/paceline/_transport/_shm.so || echo "note: built without the shared-memory" \
	  "library; to see why: $(BIN)/pip install -v --no-build-isolation --no-deps -e ."
	@echo "$(TORCH)" > $(VENV)/.torch
	@touch $@
