# The commands that people type. They use the environment that CONTRIBUTING.md sets up.
BIN ?= .venv/bin

help:
	@echo "make test   all tests"
	@echo "make quick  tests without the slow ones"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make docs   the site, into site/"
	@echo "make demo   see it work"
	@echo "make dist   the wheel and the source distribution, tried and put into dist/"

test:
	$(BIN)/pytest

quick:
	$(BIN)/pytest -m 'not download and not slow and not long'

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs:
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo:
	$(BIN)/comfedl demo

dist:
	$(BIN)/pip install -q -c constraints.txt -e '.[test,dev]'
	$(BIN)/python .ci/release.py --keep dist

.PHONY: help test quick lint docs demo dist
