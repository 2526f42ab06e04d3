# One command equals CI: `make test`. Needs make, and a Python >= 3.11 with venv and pip; everything else it installs.

# The first that really runs: a pyenv shim is on PATH without the Python behind it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# A newer Python than the one above, where newer releases of zarr and numcodecs exist; tested without torch.
NEWER_PYTHON ?= $(shell for p in python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python); do \
	$$p -c 'import venv, ensurepip' 2>/dev/null && echo $$p && break; done)

# What installs Azurite, the server of the tests of Azure; without it they are left out, and the run says so.
NPM ?= $(shell command -v npm)

BIN := .venv/bin
BIN_NEWER := .venv312/bin
BIN_BENCH := .venv-bench/bin
PYTEST_ARGS ?= -n 2 --dist worksteal
INSTALL := pip install --quiet --disable-pip-version-check -c constraints.txt
AZURITE := $(if $(NPM),.azurite/.installed)
INSTALL_BENCH := pip install --quiet --disable-pip-version-check -c .venv-bench/constraints.txt -c bench/constraints.txt

.DELETE_ON_ERROR:
.PHONY: help venv engines test check pytest test-engines test-deep test-remote fuzz lint format typecheck contracts demo bench test-py312 clean

help:
	@echo 'make demo        convert real files, seal, verify, read, and train a few steps on them'
	@echo 'make test        lint, types, import contracts and every test but those of engines'
	@echo 'make lint        ruff: rules and format'
	@echo 'make format      let ruff put the files right'
	@echo 'make typecheck   mypy --strict on the tree as installed'
	@echo 'make contracts   import contracts on the tree as installed'
	@echo 'make pytest      the tests alone; PYTEST_ARGS="-k name" for some of them; those of Azure where there is npm'
	@echo 'make test-py312  the tests that need no torch, on Python 3.12 or 3.13'
	@echo 'make bench       this reader beside what else people read with; BENCH_ARGS=--quick for a minute of it'
	@echo 'make venv        only the environment, in .venv'
	@echo 'make test-engines  the tests that run real engines, trainers and their readers: half an hour with their installation; CI runs them too'
	@echo 'make test-remote the tests of the readers again, on datasets in S3 and behind nginx'
	@echo 'make test-deep   thousands of kills, faults, flipped bytes and fuzzed files: hours, for nights'
	@echo 'make engines     SGLang, vLLM, speculators, SpecForge and other readers on the CPU, in environments of their own: 11 GB'

# --- environments ----------------------------------------------------------------------------------------------------

venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'make: no Python >= 3.11 with venv and pip found; name one: make PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'installing the environment into .venv: a minute or two, about 1.4 GB'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m $(INSTALL) setuptools
	$(BIN)/python -m $(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

.venv312/.installed: pyproject.toml constraints.txt
	test -x $(BIN_NEWER)/python || $(NEWER_PYTHON) -m venv .venv312
	$(BIN_NEWER)/python -m $(INSTALL) setuptools
	$(BIN_NEWER)/python -m $(INSTALL) --no-build-isolation --editable '.[test]'
	@touch $@

.azurite/.installed: tests/servers/npm-requirements.txt
	@test -n "$(NPM)" || { echo 'make: no npm found, which installs Azurite; name one: make NPM=/path/to/npm' >&2; exit 1; }
	@echo 'installing Azurite into .azurite'
	rm -rf .azurite
	$(NPM) install --silent --no-audit --no-fund --ignore-scripts --prefix .azurite $$(cat $<)
	@touch $@

# mosaicml-streaming by itself, and a huggingface_hub of its own: bench/constraints.txt says why.
.venv-bench/.installed: pyproject.toml constraints.txt bench/constraints.txt
	@test -n "$(PYTHON)" || { echo 'make: no Python >= 3.11 with venv and pip found; name one: make PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'installing the environment of the bench into .venv-bench: a few minutes, about 1.7 GB'
	test -x $(BIN_BENCH)/python || $(PYTHON) -m venv .venv-bench
	$(BIN_BENCH)/python -m $(INSTALL) setuptools
	sed '/^huggingface_hub==/d' constraints.txt > .venv-bench/constraints.txt
	$(BIN_BENCH)/python -m $(INSTALL_BENCH) --no-build-isolation --editable '.[bench]'
	$(BIN_BENCH)/python -m $(INSTALL_BENCH) --no-deps mosaicml-streaming
	@touch $@

# Engines and trainers, one environment each, since their pins exclude each other.
.venv-sglang/.installed: engines/sglang.sh engines/sglang-requirements.txt $(wildcard engines/sglang_cpu_shim/*)
	PYTHON=$(PYTHON) bash engines/sglang.sh $(@D)
	@touch $@

.venv-vllm/.installed: engines/vllm.sh engines/vllm-requirements.txt $(wildcard engines/vllm_cpu_shim/*)
	PYTHON=$(PYTHON) bash engines/vllm.sh $(@D)
	@touch $@

.venv-speculators/.installed: engines/speculators.sh engines/speculators-requirements.txt
	PYTHON=$(PYTHON) bash engines/speculators.sh $(@D)
	@touch $@

.venv-specforge/.installed: engines/specforge.sh engines/specforge-requirements.txt
	PYTHON=$(PYTHON) bash engines/specforge.sh $(@D)
	@touch $@

.venv-readers/.installed: engines/readers.sh engines/readers-requirements.txt
	PYTHON=$(PYTHON) bash engines/readers.sh $(@D)
	@touch $@

engines: .venv-sglang/.installed .venv-vllm/.installed .venv-speculators/.installed .venv-specforge/.installed \
		.venv-readers/.installed

# The tree as a wheel would install it: neither mypy nor import-linter follows setuptools' package-dir. build/lib is
# removed since setuptools would pack modules from it that are gone.
.PHONY: build/typecheck
build/typecheck: venv
	@rm -rf build
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target $@ .

# --- checks ----------------------------------------------------------------------------------------------------------

# In this order, cheap first, whatever -j says.
test:
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory pytest

check:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory typecheck
	@$(MAKE) --no-print-directory contracts

pytest: venv $(AZURITE)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not engine and not deep'

# One at a time: each starts servers, and the machine may have two cores.
test-engines: venv engines
	$(BIN)/python -m pytest -n 0 -m engine

# Faults, kills, sweeps, fuzzing and the state machine with many more rounds: hours. With PYTEST_ARGS="--junitxml FILE"
# tests/deep_counts.py tells what they counted.
test-deep: venv $(AZURITE)
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest $(PYTEST_ARGS) -m deep

# The readers' tests once more, with every dataset that they open in a bucket, and then on a web server: half an hour.
test-remote: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not engine and not deep' --store s3 tests/readers
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not engine and not deep' --store http tests/readers

# Coverage-guided, on Python 3.11 where atheris has a wheel; FUZZ_ARGS='manifest -max_total_time=600' for one target.
FUZZ_ARGS ?= all -max_total_time=600

.venv-fuzz/.installed: pyproject.toml constraints.txt tests/hostile/fuzz-requirements.txt
	test -x .venv-fuzz/bin/python || $(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m $(INSTALL) setuptools
	.venv-fuzz/bin/python -m $(INSTALL) --no-build-isolation --editable '.[test]'
	.venv-fuzz/bin/python -m $(INSTALL) -r tests/hostile/fuzz-requirements.txt
	@touch $@

fuzz: .venv-fuzz/.installed
	.venv-fuzz/bin/python tests/hostile/fuzz_atheris.py $(FUZZ_ARGS)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

typecheck: build/typecheck
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p hsfmt

contracts: build/typecheck
	cd build/typecheck && ../../$(BIN)/lint-imports --no-logo --cache-dir ../../.import_linter_cache ../../pyproject.toml

test-py312:
ifeq ($(NEWER_PYTHON),)
	@echo 'make test-py312: NOT RUN, no Python 3.12 or 3.13 found; name one: make test-py312 NEWER_PYTHON=/path/to/python'
else
	@$(MAKE) --no-print-directory .venv312/.installed $(AZURITE)
	@$(BIN_NEWER)/python -c 'import sys, zarr, numcodecs; print("Python", sys.version.split()[0], "zarr", zarr.__version__, "numcodecs", numcodecs.__version__)'
	$(BIN_NEWER)/python -m pytest $(PYTEST_ARGS) -m 'not torch and not engine and not deep'
endif

# --- what it does ----------------------------------------------------------------------------------------------------

demo: venv
	$(BIN)/python demo/demo.py

bench: .venv-bench/.installed
	$(BIN_BENCH)/python bench/run.py $(BENCH_ARGS)

clean:
	rm -rf build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
