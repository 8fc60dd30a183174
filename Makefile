# The commands of a developer. Each target does its own set-up, prints each step, and skips finished steps.
#
#   make train      set up .venv and train the synthetic recipe (about a minute on 2 cores)
#   make test       set up .venv and run lint, types, contracts and the tests
#   make parity     every combination of tilings, forms, optimizers and worlds against the unsharded module (minutes)
#   make simulated-gpu  the GPU's tests, with small cases, on a GPU made of host memory (about an hour)
#   make sanitize   the tests of GPU kernels under the sanitizer, which checks every access (minutes)
#   make chaos      checkpoints under kills, full disks, damage, hostile files and failing stores; prints the counts
#                   (about 25 minutes)
#   make mutate     change one operator or constant at a time, run the tests of its room, list undetected changes
#                   (an hour or two; `make mutate ARGS="--rooms sparse --count 10 --seed 7"`, or `ARGS="--at FILE:LINE"`)
#   make nightly    all tests: those that take minutes included (`make parity` among them), `make chaos`,
#                   `make sanitize`, `make simulated-gpu` and `make mutate` (hours); installs Ray, for its test
#   make bench      set up .venv and .venv-peer (TorchRec + FBGEMM) and run the benchmarks side by side
#   make docs       the site, in build/site/html; strict: broken links and undocumented public names fail
#   make wheel      one py3-none-<platform> wheel in dist/
#                   (`make wheel ARCH=aarch64`: for arm64, by Debian's cross compiler g++-aarch64-linux-gnu)
#   make check-arm64  build that wheel, and compare its library under qemu with the x86-64 one, bit by bit
#   make check-wheel  install that wheel into fresh environments and run the op tests there
#   make native     build the native library into the working tree (the targets above do so if a source has changed)
#   make clean      remove the files that the targets above made
#
# Needs: python3 (>= 3.10) with venv, make, g++, git. cmake and ninja come from pip.
#
# Variables
#   PYTHON       the Python that .venv is made with                         PYTHON=python3.12
#   TORCH_INDEX  a further index to find torch in, for CPU builds            TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   WORKERS      number of processes that run the tests (0: all in one)     WORKERS=0
#   ARGS         passed on to the program of a target                       make train ARGS="--set train.max_steps=50"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
# Tests start a hundred processes; compiled files save each of them from compiling the package anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
ARGS ?=

comma := ,
VENV := .venv
PEER := .venv-peer
BIN := $(VENV)/bin
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
LIBRARY := tilerec/ops/runtime/cpu/libtilerec_cpu.so

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.PHONY: help
help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# ------------------------------------------------------------------------------------------------ set-up

$(VENV)/.torch: constraints.txt
	$(call say,Python environment in $(VENV) with $(TORCH) (minutes$(comma) unless TORCH_INDEX offers a CPU build))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(INDEX) -c constraints.txt $(TORCH)
	touch $@

# An editable install: Python reads all files from the working tree.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(call say,tilerec and its tools)
	$(BIN)/python $(PIP_INSTALL) $(INDEX) -c constraints.txt scikit-build-core cmake ninja
	$(BIN)/python $(PIP_INSTALL) $(INDEX) -c constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

$(LIBRARY): $(VENV)/.installed CMakeLists.txt $(wildcard native/*.h native/*.cpp native/torch/*)
	$(call say,native CPU library)
	$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --log-level=WARNING -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/native
	touch $@

.PHONY: native setup
native: $(LIBRARY)
setup: $(VENV)/.installed $(LIBRARY)

$(PEER)/.installed: benchmarks/peer-requirements.txt constraints.txt
	$(call say,Peer environment in $(PEER): TorchRec + FBGEMM)
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python $(PIP_INSTALL) $(INDEX) -c constraints.txt $(TORCH)
	$(PEER)/bin/python $(PIP_INSTALL) --no-deps -r benchmarks/peer-requirements.txt
	$(PEER)/bin/python -W ignore -c 'import fbgemm_gpu, torchrec; print("torchrec", torchrec.__version__)'
	touch $@

# ------------------------------------------------------------------------------------------------ programs

.PHONY: train
train: setup
	$(call say,tilerec train synthetic)
	$(BIN)/tilerec train synthetic $(ARGS)

.PHONY: test
test: lint types contracts pytest

.PHONY: lint
lint: setup
	$(call say,lint: ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_language.py

.PHONY: format
format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: types
types: setup
	$(call say,types: mypy on the package)
	$(BIN)/mypy

.PHONY: contracts
contracts: setup
	$(call say,contracts: imports point down the layers)
	$(BIN)/lint-imports --no-cache --no-logo

.PHONY: pytest
pytest: setup
	$(call say,tests)
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: parity
parity: setup
	$(call say,parity: sharded equals unsharded$(comma) every combination)
	TILEREC_NIGHTLY=1 $(BIN)/python -m pytest -q --timeout 900 tests/parity $(ARGS)

# A step of the nightly tests. It fails if fewer faults were injected than tests/chaos/fault_counts.py states.
CHAOS := tests/chaos tests/checkpoint
.PHONY: chaos
chaos: setup
	$(call say,checkpoints under faults)
	TILEREC_NIGHTLY=1 TILEREC_CHAOS=1 $(BIN)/python -m pytest -q --timeout 1800 $(CHAOS) $(ARGS)

.PHONY: sanitize
sanitize: setup
	$(call say,kernels under the sanitizer)
	TILEREC_SANITIZE=1 $(BIN)/python -m pytest -q --timeout 900 tests/ops/triton $(ARGS)

.PHONY: simulated-gpu
simulated-gpu: setup
	$(call say,tests/cuda on a GPU made of host memory)
	$(BIN)/python tests/simulated_gpu/run.py -m pytest -q --timeout 900 tests/cuda $(ARGS)

.PHONY: mutate
mutate: setup
	$(call say,mutants of six rooms$(comma) each against the tests of its room)
	$(BIN)/python scripts/mutate.py $(ARGS)

$(VENV)/.nightly: $(VENV)/.installed
	$(call say,what the nightly tests need besides: Ray$(comma) models of Kubeflow)
	$(BIN)/python $(PIP_INSTALL) $(INDEX) -c constraints.txt --no-build-isolation --editable '.[test-nightly]'
	touch $@

# Tests that `make test` leaves out because they take minutes. After a failure the other steps still run. Files of
# `make chaos` run there, and not beside other tests: kills at random moments need steady times.
.PHONY: nightly
nightly: setup $(VENV)/.nightly
	$(call say,tests$(comma) including cases that take minutes)
	failed=; \
	TILEREC_NIGHTLY=1 $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 900 \
		$(addprefix --ignore ,$(CHAOS)) $(ARGS) || failed+=" tests"; \
	$(MAKE) --no-print-directory chaos ARGS= || failed+=" chaos"; \
	$(MAKE) --no-print-directory sanitize || failed+=" sanitize"; \
	$(MAKE) --no-print-directory simulated-gpu || failed+=" simulated-gpu"; \
	$(MAKE) --no-print-directory mutate ARGS= || failed+=" mutate"; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

.PHONY: bench
bench: setup $(PEER)/.installed
	$(call say,benchmarks against the peer (results are checked before a number is printed))
	$(BIN)/python benchmarks/jagged.py --peer $(PEER)/bin/python
	$(BIN)/python benchmarks/sharded_step.py --peer $(PEER)/bin/python $(filter --quick,$(ARGS))
	$(BIN)/python benchmarks/lookup.py --peer $(PEER)/bin/python $(ARGS)

# ---------------------------------------------------------------------------------------------------- site

$(VENV)/.docs: $(VENV)/.installed pyproject.toml
	$(call say,MkDocs with its theme and its reader of docstrings)
	$(BIN)/python $(PIP_INSTALL) $(INDEX) -c constraints.txt --no-build-isolation --editable '.[docs]'
	touch $@

# Strict: a broken link, a page without a place in the navigation, or a public name without a docstring is an error.
.PHONY: docs
docs: $(VENV)/.docs
	$(call say,the site: build/site/html/index.html)
	$(BIN)/python scripts/docs_site.py --check
	$(BIN)/python scripts/docs_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# ------------------------------------------------------------------------------------------------ release

ARCH ?= $(shell uname -m)
CROSS := CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(ARCH) -DCMAKE_CXX_COMPILER=$(ARCH)-linux-gnu-g++" \
	_PYTHON_HOST_PLATFORM=linux-$(ARCH)

.PHONY: wheel
wheel: $(VENV)/.installed
	$(call say,wheel for $(ARCH))
	rm -rf dist build/wheel
	$(if $(filter-out $(shell uname -m),$(ARCH)),$(CROSS)) TILEREC_NATIVE_REQUIRED=1 $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	ls -l dist/*.whl

.PHONY: check-wheel
check-wheel: wheel
	$(call say,the wheel in fresh environments)
	$(BIN)/python scripts/check_wheel.py dist/*.whl $(if $(TORCH_INDEX),--index $(TORCH_INDEX)) $(ARGS)

.PHONY: check-arm64
check-arm64: $(LIBRARY)
	$(MAKE) --no-print-directory wheel ARCH=aarch64
	$(call say,the arm64 library under qemu)
	$(BIN)/python scripts/check_arm64.py dist/*aarch64.whl

# What uses private names of torch, and what they serve: tiles as DTensors, DDP, checkpoints, sharded steps.
TORCHES ?= 2.11.0 2.12.1 2.13.0
CROSS_SECTION := tests/test_torch_private.py tests/sharding/test_tiled_tensor.py tests/sharding/test_embedding.py \
	tests/parallel/test_model_parallel.py tests/parallel/test_checkpoint.py tests/parallel/two_d/test_dmp_collection.py \
	tests/optim tests/golden tests/ops/test_gradient.py tests/ops/test_opcheck.py tests/export

.PHONY: check-torch
check-torch: wheel
	$(call say,the tests that lean on torch$(comma) under torch $(TORCHES))
	$(BIN)/python scripts/check_wheel.py dist/*.whl $(if $(TORCH_INDEX),--index $(TORCH_INDEX)) \
		$(foreach version,$(TORCHES),--env $(PYTHON)=$(version)) --tests $(CROSS_SECTION)

.PHONY: clean
clean:
	rm -rf $(VENV) $(PEER) $(LIBRARY) tilerec/export/lib build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
