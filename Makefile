# make demo    run the first notebook and print its accuracy
# make test    set up what is missing and run every test; ARGS="-k telemetry" is passed on to pytest
# make lint    style, types and import contracts
# make bench   the figures of the README, measured here
# make lab     JupyterLab on notebooks/
# make clean   remove the virtual environment, caches and artefacts

SHELL := /bin/bash
# Any Python from 3.11 on; where this one is missing, tools/venv.sh looks for another.
PYTHON ?= python3.11
BIN := .venv/bin
ARGS ?=

.PHONY: demo test lint bench lab clean .venv
.DEFAULT_GOAL := test

.venv:
	@tools/venv.sh .venv "$(PYTHON)"

demo: .venv
	$(BIN)/python tools/demo.py

test: .venv
	@tools/apt.sh
	$(BIN)/python -m pytest $(ARGS)

lint: .venv
	$(BIN)/python tools/lint.py

bench: .venv
	$(BIN)/python -m benchmarks $(ARGS)

lab: .venv
	$(BIN)/python -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

clean:
	rm -rf .venv build dist artefacts .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
