# make demo    a trained policy drives the built-in robot over a real connection; writes relay-demo/
# make test    all quick tests (those for a GPU, fetched vocabularies or stock peers are left out where these are missing)
# make test-slow  the others: whole episodes, and waits of up to a minute in real time (several minutes in all)
# make test-all  on every Python found from 3.10 to 3.14: what needs no torch, with newest, older and oldest packages
# make check   formatting, lint, types, import rules: what pre-commit and CI run
# make vocab   fetch the tokenizer files that some tests compare against
# make fuzz    200,000 damaged and hostile messages through the decoder (ARGS="--messages N --seed S --jobs J")
# make lock    write down the versions in use, for the interpreter in use, into requirements/
# make stock   an environment with the stock openpi client and server, for compatibility tests and benchmarks
# make deploy-tools   an environment with Modal's package and linters of Docker and Kubernetes, for tests of the recipes
# make fronts  Debian's nginx and HAProxy in a folder of their own, for tests of what stands before a server
# make references   an environment with Orbax and JAX, which write checkpoints for tests of their reader
#
# PYTHON=...      the interpreter to use (default: the first of 3.10 or newer found, 3.11 preferred)
# ARGS=...        arguments for pytest, or for the program that the target runs
# JOBS=N          how many processes share the quick tests (default: 2; with ARGS none but pytest's own, in order)
# TORCH_ARGS=...  extra options for "pip install torch", such as an index with CPU builds

PYTHON ?= $(shell scripts/find-python)
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# The versions that were tested with this interpreter, where they are written down.
LOCK = requirements/$(shell $(BIN)/python -c 'import sys; print("python%d.%d.txt" % sys.version_info[:2])')
PIP = $(BIN)/python -m pip --disable-pip-version-check install $(if $(wildcard $(LOCK)),-c $(LOCK))
ARGS ?=
JOBS ?= $(if $(ARGS),0,2)

.PHONY: demo test test-slow test-all check fuzz format vocab stock fronts deploy-tools references lock bench clean

demo: $(VENV)/installed-demo
	@echo "==> a server, a client and the built-in robot: ten episodes"
	$(BIN)/relay demo $(ARGS)

test: $(VENV)/installed-dev
	@echo "==> running the tests (a few minutes on two cores)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(VENV)/installed-dev
	@echo "==> running the slow tests (several minutes)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

test-all:
	@$(PYTHON) scripts/every_python.py $(ARGS)

check: $(VENV)/installed-dev
	@echo "==> lint, format, types, import rules"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

fuzz: $(VENV)/installed-dev
	$(BIN)/python tests/protocol/fuzz_messages.py $(ARGS)

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

vocab: | $(VENV)/created
	@$(BIN)/python scripts/vocab.py

bench: $(VENV)/installed-dev stock
	$(BIN)/python benchmarks/wire.py $(ARGS)
	$(BIN)/python benchmarks/robots.py

stock: .venv-stock/installed

references: .venv-orbax/installed

deploy-tools: | $(VENV)/created
	@$(BIN)/python scripts/deploy_tools.py

fronts: | $(VENV)/created
	@$(BIN)/python scripts/fronts.py

lock: $(VENV)/installed-dev
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch > $(LOCK)

clean:
	rm -rf $(VENV) .venv-stock .venv-3.* .venv-orbax .venv-deploy .fronts relay-demo

$(VENV)/created:
	@echo "==> creating $(VENV) with $(PYTHON)"
	@test -n "$(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/torch: | $(VENV)/created
	@echo "==> installing $(TORCH) (the largest part; set TORCH_ARGS for another index)"
	@$(PIP) $(TORCH) $(TORCH_ARGS)
	@touch $@

$(VENV)/installed-demo: pyproject.toml | $(VENV)/torch
	@echo "==> installing relay with its server and demo"
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/torch
	@echo "==> installing relay with everything for development"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/installed-demo

.venv-stock/installed: benchmarks/stock.py | $(VENV)/installed-dev
	@echo "==> installing the stock openpi client and server into .venv-stock"
	@$(BIN)/python benchmarks/stock.py
	@touch $@

.venv-orbax/installed: scripts/references.py | $(VENV)/created
	@echo "==> installing Orbax and JAX into .venv-orbax"
	@$(BIN)/python scripts/references.py
	@touch $@
