# Three commands do everything on a fresh machine with Python and make:
#   make demo      train on a built-in data set; a few minutes on two cores
#   make test      ruff, mypy and all tests except the rehearsals
#   make rehearse  whole jobs that are started, killed and recovered: local, over ssh, on simulated EC2 machines
#   make boot-test the user data of a rented machine boots in QEMU; ten minutes, no KVM; not part of `make test`
#   make release-check   what a release must pass beside `make test`: rehearse and boot-test
# Each creates .venv and installs everything once, at the versions of constraints.txt. tmux and OpenSSH come from apt
# where that is allowed; the tests also need a browser.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test rehearse boot-test release-check check format bench benchmarks peers experiments simcloud clean

demo: .venv/.installed
	$(BIN)/imgnet-cluster launch --local -y recipes/quickstart.py

test: check
	$(BIN)/pytest -n 2 --dist loadfile -m "not rehearsal"

rehearse: check
	$(BIN)/pytest -m rehearsal

# Needs packages from apt and, for its disk image (once), root; it says which.
boot-test: .venv/.installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m support.boot_test

release-check: rehearse boot-test

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
simcloud: .venv/.installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m support.simcloud

.venv/.installed: pyproject.toml constraints.txt tools.sh
	PYTHON=$(PYTHON) sh tools.sh
	@echo "installing PyTorch and other packages into .venv: 1 GB, or several GB with an NVIDIA driver; takes minutes"
	sh tools.sh torch
	$(PIP) --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable ".[dev]"
	sh tools.sh browser
	touch $@

clean:
	rm -rf .venv benchmarks/.venv .mypy_cache .pytest_cache .ruff_cache *.egg-info
