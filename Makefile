# Every target makes .venv where it is missing and installs vitfast into it: for the demo what training needs, for the
# others everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRITONS ?= 3.6.0 3.9.0
SMS ?= 80 or 89 or 90
# An import of torch and timm takes three times as long without byte code, and the tests start many processes:
# an environment that forbids writing it waits.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test slow oldest long gpu planted tritons loggers bench codegen docs build lint clean
help:  ## say what each target does
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

# setup.py is the only thing that changes what is installed: the package itself is an editable install.
# --no-compile: most of it is never imported.
$(READY): EXTRA := all
$(VENV)/.train: EXTRA := train
$(READY) $(VENV)/.train: setup.py pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python {v[0]}.{v[1]} is too old" if v < (3, 10) else 0)' \
	    || { echo "vitfast needs Python 3.10 or newer: make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[$(EXTRA)]' $(addprefix -c ,$(CONSTRAINTS))
	touch $@

demo: $(if $(wildcard $(READY)),$(READY),$(VENV)/.train)  ## pre-train and fine-tune a small ViT on handwritten digits; write runs/demo/
	$(BIN)/vitfast demo --output runs/demo

test: $(READY)  ## run the tests of a change, in minutes (tests marked gpu run only with a GPU)
	$(BIN)/python -m pytest -n 2 --maxschedchunk 2 -q -m "not slow and not long" tests

slow: $(READY)  ## run the tests that take many seconds each: more shapes, compiled code, processes, packages
	$(BIN)/python -m pytest -n 2 --maxschedchunk 2 -q -m "slow and not long" tests

oldest:  ## run both with the oldest versions that setup.py allows, in .venv-oldest
	mkdir -p .venv-oldest
	$(PYTHON) tests/oldest.py > .venv-oldest/constraints.txt
	$(MAKE) test slow VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt

long: $(READY)  ## run the tests that take minutes each: other seeds, runs that are killed, more shapes under the sanitizer
	$(BIN)/python -m pytest -n 2 -q -m long tests

gpu: $(READY)  ## run the tests that need a GPU, and compare every kernel with float64 on it
	$(BIN)/vitfast doctor
	$(BIN)/python -m pytest -q -m gpu tests

planted: $(READY)  ## plant bugs in copies of the package, and run the tests that must find them
	$(BIN)/python -m pytest -n 2 -q tests/test_planted.py tests/tools/verify/test_edges.py -k planted

tritons: $(READY)  ## compile the kernels with other versions of Triton, and hold their limits of instructions
	for version in $(TRITONS); do \
	    test -d $(VENV)/triton-$$version || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	        --no-deps --no-compile --target $(VENV)/triton-$$version triton==$$version || exit 1; \
	    PYTHONPATH=$(CURDIR)/$(VENV)/triton-$$version $(BIN)/python -m pytest -n 2 -q tests/tools/machine_code \
	        -k "hazards or compiles_well_for and ($(SMS))" || exit 1; \
	done

# MLflow lies apart: its packages would replace others of the environment by older ones
loggers: $(READY)  ## run the pages of W&B, MLflow and Lightning
	test -d $(VENV)/mlflow || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	    --target $(VENV)/mlflow mlflow
	PYTHONPATH=$(CURDIR)/$(VENV)/mlflow $(BIN)/python -m pytest -q -rs tests/docs/test_code_blocks.py -k library_that_it_needs

bench: $(READY)  ## run the benchmarks: real shapes on a GPU, small ones on a CPU
	mkdir -p bench/results/local
	$(BIN)/python -m pytest bench --benchmark-only -q --case-limit 300 \
	    --benchmark-json=bench/results/local/benchmarks.json

codegen: $(READY)  ## compile every kernel for every GPU generation, and write tests/codegen.csv
	$(BIN)/python tests/codegen.py

docs: $(READY)  ## build the documentation, site/index.html; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

build: $(READY)  ## build the sdist and, from it, the wheel; write dist/
	rm -rf dist
	$(BIN)/python -m build

lint: $(READY)  ## check code with ruff, the types of the public names with pyright, and .github
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[a-z]*_*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

clean:  ## remove .venv, runs and caches
	rm -rf .venv .venv-oldest runs build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
