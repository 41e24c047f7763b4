# Two commands matter: `make demo` and `make test`. Both do all set-up themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := models/smollm2-135m-fp32
PIP    := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check \
          --constraint constraints.txt

.PHONY: help setup model demo test check fmt size bench chaos pins clean

help:           ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"livebatch needs Python 3.11 or newer, this is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11") if v < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: install your system's python3-venv package" >&2; exit 1; }
	@echo "installing the pinned dependencies (one to four minutes) ..."
	@$(PIP) --editable '.[cpu,local]'
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@echo "installing the developers' tools ..."
	@$(PIP) --editable '.[cpu,local,dev]'
	@touch $@

setup: $(VENV)/.ready  ## virtual environment with pinned dependencies

$(MODEL)/genai_config.json: | $(VENV)/.ready
	@$(BIN)/python -m worker.build.fetch --out $(MODEL)

model: $(MODEL)/genai_config.json  ## download and build the default model (SmolLM2-135M-Instruct)

demo: setup model  ## run 24 prompts through Redis, a worker and a real model
	@$(BIN)/python examples/demo.py --model $(MODEL)

test: $(VENV)/.dev model   ## all tests
	$(BIN)/python -m pytest

check: $(VENV)/.dev  ## what a commit must pass: format, lint, types, import arrows, house rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/house

fmt: $(VENV)/.dev  ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

size: $(VENV)/.dev  ## lines per file and per function
	@$(BIN)/python tests/house/sizes.py

bench: setup model  ## tokens/s from the bare model step up to the whole path
	$(BIN)/python benchmarks/path.py --model $(MODEL)

chaos: setup model  ## 5,000 rows under 50 faults, without a model, then with one; CHAOS='--seed 7 --storms 20' for others
	PYTHONPATH=tests:. $(BIN)/python -m chaos.storm --rows 5000 $(CHAOS)
	PYTHONPATH=tests:. $(BIN)/python -m chaos.storm --rows 5000 --model $(MODEL) $(CHAOS)

pins: $(VENV)/.dev  ## write constraints.txt from what is installed
	@{ echo '# Exact versions of everything `make setup` installs. Renewed with `make pins`.'; $(BIN)/python -m pip freeze --exclude-editable; } > constraints.txt

clean:          ## remove what make made
	rm -rf $(VENV) models .cache out
