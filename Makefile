# On a fresh machine with Python and make:
#   make help           this list
#   make demo           train on a built-in data set; a few minutes on two cores
#   make test           the tests that run in one process; three minutes
#   make check          ruff and mypy
#   make smoke          about twenty tests of whole jobs and real processes, which show every part once
#   make flaky          repeats TESTS=... beside busy loops, to find those that fail by chance
#   make process        all tests with real sshd, tmux, agents, trainers and commands
#   make rehearse       all other whole jobs that are started, killed and recovered: local, over ssh, on simulated EC2
#                       machines; SHARD=2/4 for the second of four parts
# Continuous integration runs check, test and smoke (.ci/run).
#   make simcloud       a simulated EC2, to try the launch on AWS without an account
#   make gpu-test       the tests that need an NVIDIA GPU
#   make gpu-bench      measures one NVIDIA GPU, in parts; BUDGET=600 for ten minutes
#   make boot-test      the user data of a rented machine boots in QEMU; ten minutes, no KVM; not part of `make test`
#   make release-check  what a release must pass beside these: boot-test, and the self-test on simulated EC2
# Each creates .venv and installs what it needs once, at the versions of constraints.txt. tmux and OpenSSH come from apt
# where that is allowed; the tests also need a browser.

PYTHON ?= python3
BIN := .venv/bin
# Without --no-compile pip compiles thousands of modules of torch that nothing imports; Python compiles those that are.
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile --constraint constraints.txt

# Tests start hundreds of interpreters; they compile our modules once, also where the shell forbids it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test smoke flaky process rehearse gpu-test gpu-bench boot-test release-check check format bench benchmarks peers experiments simcloud clean

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: .venv/.installed
	$(BIN)/imgnet-cluster launch --local recipes/quickstart.py

# A computer that runs other work needs more patience: TEST_PATIENCE=5 multiplies every limit of the tests.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --maxfail 3

test: .venv/.installed-dev
	$(PYTEST) -m "not process and not rehearsal"

# A test that fails is run once more, and the failure is printed and recorded in .ci/reruns.log.
smoke: .venv/.installed-dev
	$(PYTEST) --reruns 1 -rR $$($(BIN)/python tests/support/gate.py)

# Repeats TESTS beside busy loops and prints what fails by chance.
flaky: .venv/.installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m support.flaky $(TESTS)

process: .venv/.installed-dev
	$(PYTEST) -m "process and not rehearsal"

rehearse: .venv/.installed-dev
	sh tools.sh slurm
	$(PYTEST) -n 3 --dist load -m "rehearsal and not release and not smoke" --durations-path tests/durations.json $(if $(SHARD),--splits $(notdir $(SHARD)) --group $(patsubst %/,%,$(dir $(SHARD))))

gpu-test: .venv/.installed-dev
	IMGNET_GPU_TESTS=1 $(BIN)/pytest -m gpu tests/gpu

# BUDGET: seconds for all parts; IMAGES, DATA: photographs and CIFAR-10 as JPEG files, without which drawn images are measured and CIFAR-10 is not.
gpu-bench: .venv/.installed
	$(BIN)/python benchmarks/training/gpu.py --budget $(or $(BUDGET),1500) $(if $(IMAGES),--images $(IMAGES)) $(if $(DATA),--cifar $(DATA))

# Needs packages from apt and, for its disk image (once), root; it says which.
boot-test: .venv/.installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m support.boot_test

release-check: check test smoke process rehearse boot-test
	$(BIN)/pytest -m release

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --exclude '^tests/(support|peers/scripts)/' -p cluster -p infra -p recipes -p train -p tests
	$(BIN)/mypy -p support -p experiments

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# IMAGES: photographs, a folder or a tar file; without it, images are generated. Run `make peers` first to compare with them.
bench: .venv/.installed-dev
	$(BIN)/python benchmarks/run.py $(if $(IMAGES),--images $(IMAGES))

benchmarks: bench

peers:
	PYTHON=$(PYTHON) sh benchmarks/peers.sh

# DATA: CIFAR-10 as JPEG files; IMAGES: photographs. Each is a folder or a tar file. About three hours; a second call continues.
experiments: .venv/.installed-dev
	$(BIN)/python experiments/run.py $(if $(DATA),--data $(DATA)) $(if $(IMAGES),--photographs $(IMAGES))

# A simulated EC2 with real sshd machines behind it, to try the tool without an account: prints what to export; ends with Ctrl-C.
# PORT: another one than 5555, for a second simulation.
simcloud: .venv/.installed-simcloud
	PYTHONPATH=.:tests $(BIN)/python -m support.simcloud $(if $(PORT),--port $(PORT))

.venv/.torch: pyproject.toml constraints.txt tools.sh
	PYTHON=$(PYTHON) sh tools.sh
	@echo "installing PyTorch and other packages into .venv: 1 GB, or several GB with an NVIDIA driver; takes minutes"
	sh tools.sh torch
	touch $@

.venv/.installed: .venv/.torch
	$(PIP) --editable .
	touch $@

.venv/.installed-dev: .venv/.torch
	$(PIP) --editable ".[dev]"
	sh tools.sh browser
	touch .venv/.installed $@

.venv/.installed-simcloud: .venv/.installed
	$(PIP) --editable ".[simcloud]"
	touch $@

clean:
	rm -rf .venv benchmarks/.venv .mypy_cache .pytest_cache .ruff_cache *.egg-info
