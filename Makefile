# Turnkeep. `make` alone explains the words.
.DEFAULT_GOAL := help
.PHONY: help need-python serve test test-peers check prove model setup clean
SHELL := /bin/sh

# A Python that Turnkeep runs on; 3.11 is preferred. `make PYTHON=/path/to/python ...` names another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
  $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 \
  && { echo $$python; break; }; done)
BIN := .venv/bin
export TORCH_INDEX

help:
	@echo 'make serve   set all up (once), then run the gateway with its embedded engine:'
	@echo '             virtual environment in .venv, packages, the demonstration model, the database'
	@echo '             make serve ARGS="--model FOLDER --port 9000": options of `turnkeep serve`'
	@echo 'make test    set all up, then run every test'
	@echo 'make test-peers   the adapters against a real llama.cpp server and a real vLLM, where wheels of them are'
	@echo 'make check   the static checks: ruff, mypy, import-linter'
	@echo 'make prove   the long proofs: soak, load, faults at length'
	@echo 'make model   fetch and convert the demonstration model (SmolLM2-135M-Instruct), once'
	@echo 'make clean   remove the environment and caches; sessions (.turnkeep) and models stay'
	@echo ''
	@echo 'PYTHON=...       a Python 3.11, 3.12 or 3.13 of your choice'
	@echo 'TORCH_INDEX=...  which torch: cpu, cuda, or the URL of a package index. Not set: the CPU build where'
	@echo '                 nvidia-smi sees no GPU, the CUDA build where it does, on macOS the one there is.'

need-python:
	@test -n "$(PYTHON)" || { echo 'No Python 3.11, 3.12 or 3.13 was found. Install one (Debian: apt install python3.11 python3.11-venv;' \
	  'macOS: brew install python@3.11) and run make again, or name it: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }

serve: need-python
	@$(PYTHON) scripts/setup.py serve
	@exec $(BIN)/turnkeep serve $(ARGS)

setup: need-python
	@$(PYTHON) scripts/setup.py test

model: need-python
	@$(PYTHON) scripts/setup.py serve
	@$(BIN)/turnkeep models fetch

test: setup
	@$(BIN)/turnkeep models fetch
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m 'not prove' $(ARGS)

test-peers: setup
	@$(BIN)/turnkeep models fetch
	@env $$($(BIN)/python scripts/peers.py .venv/peers) $(BIN)/python -m pytest -rs tests/contracts/test_real_llamacpp.py \
	  tests/contracts/test_real_vllm.py $(ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

prove: setup
	@$(BIN)/turnkeep models fetch
	@TURNKEEP_TEST_KEYWORDS=1 $(BIN)/python -m pytest -m prove --timeout=3600 $(ARGS)
	@$(BIN)/python scripts/prove.py

clean:
	@rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis htmlcov .coverage .coverage.*
	@find . -name __pycache__ -not -path './.git/*' -type d -exec rm -rf {} +
	@echo 'Removed the environment and caches. Sessions (.turnkeep) and models were left alone.'
