# Two commands: `make demo` and `make test`. Each needs only Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit docs examples bench clean

demo: $(VENV)/.sim
	$(BIN)/fedcohort demo

test: lint types unit docs examples

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -q

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going -j 2 docs $(VENV)/site

examples: $(VENV)/.dev
	for file in examples/*.py; do echo "$$file"; $(BIN)/python "$$file" > /dev/null || exit 1; done

bench: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python bench/ask_tell.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt pip

# torch goes first and alone, so that its pinned build is there before anything else asks for a looser one.
$(VENV)/.sim: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[sim,report]"
	touch $@

$(VENV)/.dev: $(VENV)/.sim
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[sim,flower,report,he,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site
