# Three commands do everything on a fresh machine with Python and make:
#   make demo      train the main path on a built-in data set, in a few minutes on two cores
#   make test      ruff, mypy and the tests, but for
#   make rehearse  whole jobs: started, killed, brought back, here, over ssh, on rented machines
# Each makes .venv, installs once, and brings tmux and OpenSSH through apt where it may; the tests also a browser.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test rehearse check format bench benchmarks peers experiments simcloud clean

demo: .venv/.installed
	$(BIN)/imgnet-cluster launch --local -y recipes/quickstart.py

test: check
	$(BIN)/pytest -n 2 --dist loadfile -m "not rehearsal"

rehearse: check
	$(BIN)/pytest -m rehearsal

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# IMAGES: photographs, a folder or a tar; without, images are drawn. The peers first: make peers.
bench: .venv/.installed-dev
	$(BIN)/python benchmarks/run.py $(if $(IMAGES),--images $(IMAGES))

benchmarks: bench

peers:
	PYTHON=$(PYTHON) sh benchmarks/peers.sh

# DATA: CIFAR-10 as JPEG files, IMAGES: photographs; each a folder or a tar. About three hours; called again it goes on.
experiments: .venv/.installed-dev
	$(BIN)/python experiments/run.py $(if $(DATA),--data $(DATA)) $(if $(IMAGES),--photographs $(IMAGES))

# A simulated EC2 with machines behind it, for a person: prints what to export, until Ctrl-C.
simcloud: .venv/.installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m support.simcloud

.venv/.installed: pyproject.toml tools.sh
	PYTHON=$(PYTHON) sh tools.sh
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	sh tools.sh browser
	touch $@

clean:
	rm -rf .venv benchmarks/.venv .mypy_cache .pytest_cache .ruff_cache *.egg-info
