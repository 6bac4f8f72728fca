# Every target creates .venv and installs into it by itself.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
# Two test processes with one torch thread each use two cores best.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test fuzz lint types docs bench clean

help:            ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]" -e "./papers[test]"
	@touch $@

demo: $(STAMP)   ## the main job on bundled data, with a report at the end
	$(BIN)/minimand demo

test: $(STAMP)   ## the laws, on two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile

fuzz: $(STAMP)   ## random tests of norms, gradients, certificates and bad input, for about an hour
	$(BIN)/python -m tests.fuzz

lint: $(STAMP)   ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## static types
	$(BIN)/mypy

docs: $(STAMP)   ## build the documentation, its examples included; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(STAMP)  ## ratios to the plain block and to peers
	$(BIN)/minimand bench

clean:           ## remove what the other targets made
	rm -rf .venv docs/_build docs/_generated docs/gallery runs
