# `make run` and `make test` need python3.11 or later (with venv), make, and nothing else.
SHELL := /bin/bash
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; override with `make PYTHON=/path/to/python3`.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
WORKERS ?= 2
# Through the environment, so that quotes in a prompt survive.
export PROMPT

.PHONY: help run test gpu-test large-models bench lint format types layers page docs pictures sbom install install-dev browser clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: install ## answer a prompt with speculation on: make run PROMPT="..."
	@$(BIN)/draftloop run $${PROMPT:+--prompt "$$PROMPT"}

test: install-dev browser ## the whole CPU test suite
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

gpu-test: install-dev ## the tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

large-models: install-dev ## tests of real models that are too large for every run: 240 MB, a few minutes
	$(BIN)/pytest --large-models tests/e2e/test_gemma3_270m.py $(ARGS)

bench: install ## decode latency of the default model: make bench ARGS="--batch-sizes 1,8"
	$(BIN)/draftloop bench latency $(ARGS)

lint: install-dev ## format and lint checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: install-dev ## reformat and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: install-dev ## type checks
	$(BIN)/pyrefly check

layers: install-dev ## check that imports point one way
	$(BIN)/lint-imports --no-logo

page: web/node_modules/.installed ## check, test and build the server's page, which is committed (needs npm)
	@cd web && npm run --silent check && npm run --silent test && npm run --silent build

docs: $(VENV)/.installed-docs ## build the documents as a site: build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: install-dev browser ## draw docs/pictures anew, from a run and from docs/numbers
	@$(BIN)/python tools/pictures.py

sbom: install-dev build/sbom-env/.installed ## what draftloop is installed with here, as CycloneDX: build/sbom.json
	@build/sbom-env/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

browser: # Chromium, for tests of the page, where it can be had
	@tools/install_browser.sh

install: $(VENV)/.installed ## make .venv and install draftloop

install-dev: $(VENV)/.installed-dev ## .. and what tests and checks need

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist web/node_modules web/build
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "draftloop needs Python 3.11 or later; install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or later; leave PYTHON out, or name another" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }

# Keyed on what decides the environment's contents, so that a second run starts at once.
$(VENV)/.installed: pyproject.toml tools/install_torch.sh | $(VENV)/bin/python
	@echo "Installing draftloop into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' || { \
		echo "pip cannot download: is there a network, and is pip's index the right one (pip config list)?" >&2; exit 1; }
	@tools/install_torch.sh $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --group dev
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --group docs
	@touch $@

build/sbom-env/.installed: pyproject.toml | $(VENV)/bin/python
	@$(BIN)/python -m venv build/sbom-env
	@build/sbom-env/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	@build/sbom-env/bin/python -m pip install --quiet --group sbom
	@touch $@

web/node_modules/.installed: web/package-lock.json
	@cd web && npm ci --silent --no-progress
	@touch $@
