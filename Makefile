# `make run` and `make test` do all set-up on a fresh machine; called again, they start at once.

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
WORKERS ?= 2
FLOWER ?= flower
RAY_TESTS ?= ray

.PHONY: help run test lint unit test-all test-slow test-gpu test-browser test-flower test-ray test-wheel format leaderboard pages docs clean

help:  ## say what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

run: .venv/for-run  ## set up if needed, then the quick start: eight methods on embedded data, one table
	$(BIN)/fedstill compare

test: lint unit  ## set up if needed, then lint and the quick tests: every claim once

lint: .venv/for-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: .venv/for-test
	$(PYTEST) -n $(WORKERS) --dist worksteal src tests benchmarks

test-all: lint .venv/for-test  ## lint and every test that needs no GPU (the whole matrix, slow ones too); prints the coverage
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not slow and not gpu and not browser and not flower and not ray' --cov --cov-report=term:skip-covered
	$(PYTEST) -m 'slow and not gpu and not flower and not ray'  # without coverage, because some of them measure seconds

test-slow: .venv/for-test  ## tests that take longer than a few seconds each
	$(PYTEST) -m 'slow and not gpu and not flower and not ray'

test-gpu: .venv/for-test  ## tests that need a CUDA device
	$(PYTEST) -m gpu

test-browser: .venv/for-test  ## tests that drive a page in Chromium (chromium and chromedriver of the system)
	$(PYTEST) -m browser

test-flower: .venv-flower/made  ## runs over Flower, in an environment of its own; FLOWER='flower and not slow' is the short form
	PATH="$(CURDIR)/.venv-flower/bin:$$PATH" OMP_NUM_THREADS=1 python -m pytest -m '$(FLOWER)' tests/deploy

test-ray: .venv-ray/made  ## tests that need the extra `ray`, in an environment of their own; RAY_TESTS='ray and not matrix' takes some
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -m "$(RAY_TESTS)" tests/population/test_on_ray.py tests/experiment/test_cluster.py tests/cli/test_bench.py tests/conformance/test_on_ray.py benchmarks/storm/test_doors.py

test-wheel: .venv/for-test  ## build the wheel, install it in a fresh environment, run it and predict from bundles outside this folder
	tools/try_wheel.sh $(PYTHON)

format: .venv/for-test  ## let ruff format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

leaderboard: .venv/for-test  ## run the leaderboard's missing runs, then write its page and the README's table anew
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/leaderboard/run.py
	$(BIN)/python tools/make_leaderboard_pages.py

pages: .venv/for-test  ## write the generated parts of the documentation anew
	$(BIN)/python tools/make_method_pages.py
	$(BIN)/python tools/make_result_pages.py
	$(BIN)/python tools/make_leaderboard_pages.py
	$(BIN)/python tools/make_peers_table.py

docs: .venv/for-docs  ## build the documentation as a site; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove the environment and the caches of the tools, and the site; runs/ and ~/.cache/fedstill stay
	rm -rf .venv .venv-flower .venv-ray .venv-peers site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

.venv/made:
	@test -n '$(PYTHON)' || { echo 'fedstill needs Python 3.11 to 3.13: install one, or say make PYTHON=...' >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo 'Installing into .venv; the first time this takes a few minutes.'
	@touch $@

.venv-flower/made: pyproject.toml constraints-flower.txt
	test -x .venv-flower/bin/pip || $(PYTHON) -m venv .venv-flower
	@echo 'Installing into .venv-flower; the first time this takes a few minutes.'
	.venv-flower/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-flower.txt \
		-e '.[data,plots,report,text,flower]' pytest hypothesis
	@touch $@

.venv/for-run: .venv/made pyproject.toml constraints.txt
	$(PIP) -e '.[data,plots,report]'
	@touch $@

.venv/for-test: .venv/made pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@ .venv/for-run .venv/for-docs

.venv-ray/made: pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'fedstill needs Python 3.11 to 3.13: install one, or say make PYTHON=...' >&2; exit 1; }
	test -x .venv-ray/bin/pip || $(PYTHON) -m venv .venv-ray
	@echo 'Installing into .venv-ray; the first time this takes a few minutes.'
	.venv-ray/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[dev,ray]'
	@touch $@

.venv/for-docs: .venv/made pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@
