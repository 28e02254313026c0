# Two commands: `make demo` and `make test`. Each needs only Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What builds the package is pinned like what it needs; -c alone does not reach the environment it is built in.
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
# Tests and examples start many processes, which should not compile the package again each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types unit docs site examples hosts bench nightly lock clean

demo: $(VENV)/.sim
	$(BIN)/fedcohort demo

test: lint types unit docs examples

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

# Tests that depend on how fast the machine is run one after another when all others have passed.
unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -n 2 --dist loadfile -m "not clock and not slow and not gpu"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "clock and not slow and not gpu"

# The site as a folder that any page host serves: this version, and every tagged one beside it under its number.
site: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going -j 2 docs site
	docs/_site/versions.sh site $(BIN)

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going -j 2 docs $(VENV)/site

examples: $(VENV)/.dev
	for file in examples/*.py; do echo "$$file"; $(BIN)/python "$$file" > /dev/null || exit 1; done

# The hosts' tests on the oldest release of Flower we claim and on the newest, and on NVIDIA FLARE.
hosts: $(VENV)/.dev
	.ci/hosts

bench: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python bench/scripts/ask_tell.py

# A million cases of fuzzing, and some more because a few events of a session turn out to be none; SHARDS=1 CASES=25000
# for less. The same command on the same day goes on where it stopped.
CASES ?= 1050000
SHARDS ?= 42
nightly: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz.nightly --cases $(CASES) --shards $(SHARDS) --out $(VENV)/nightly

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip

# torch goes first and alone, so that its pinned build is there before anything else asks for a looser one.
$(VENV)/.sim: pyproject.toml bench/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[sim,report]" -e bench
	touch $@

$(VENV)/.dev: $(VENV)/.sim
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[sim,flower,report,keyholder,dp,dev]" -e bench
	touch $@

# The releases' locks with hashes; see CONTRIBUTING.md.
LOCK := $(BIN)/uv pip compile -q --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
	--python-version 3.11 --custom-compile-command "make lock" -c constraints.txt
lock: $(VENV)/.dev
	$(LOCK) --python-platform x86_64-unknown-linux-gnu --extra sim --extra report --extra flower pyproject.toml \
		-o requirements/lock-linux-x86_64-py311.txt
	$(LOCK) --universal requirements/build.in -o requirements/build.txt

clean:
	rm -rf $(VENV) build dist site
