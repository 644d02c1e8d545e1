# make demo    see it work: a virtual environment, an install, and a training run
# make observe   a longer one, with Prometheus and its alerts: says where to look at it
# make test    everything that must hold: lint, types, and the whole test suite
# make lint    the first part of it
# make bench   measure start, restart, memory and probe cost beside torchrun
# make bench-recovery   measure recovery beside torchrun (and ft_launcher: FT_LAUNCHER=path)
# make bench-overhead   measure what the profiler costs a job (TRACEML=path of its command: beside it)
# make clean   remove what these made
#
# PYTHON=python3.12   which Python (3.11 or newer) makes the virtual environment
# RANKS=8             how many ranks demo and observe start
# PIP_ARGS=...        more arguments for pip: another index, say
# PYTEST_ARGS=...     more arguments for pytest
# TESTS_AT_ONCE=2     how many tests run beside each other
# TESTS_LIVE=1        with those that take Prometheus minutes
# REPORTS=folder      where to write what each of them came to (JUnit's XML)

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
TESTS_AT_ONCE ?= 2
TESTS_LIVE ?=
REPORTS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)

# Four ranks where there are four cores; on a machine with GPUs no more than one each, but two to have company.
CORES := $(shell nproc 2>/dev/null || echo 2)
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ')
RANKS ?= $(shell n=2; [ $(CORES) -ge 4 ] && n=4; \
	[ $(GPUS) -gt 0 ] && [ $(GPUS) -lt $$n ] && n=$(GPUS); [ $$n -lt 2 ] && n=2; echo $$n)

.PHONY: help demo observe test lint bench bench-recovery bench-overhead clean

help:
	@sed -n '/^# /s/^# //p;/^$$/q' Makefile

demo: $(VENV)/.examples
	$(BIN)/gpulaunch --nproc $(RANKS) examples/digits_ddp.py

observe: $(VENV)/.examples
	@$(BIN)/python deploy/observe/observe.py --nproc $(RANKS)

# Most tests wait for processes: two at a time take a little more than half as long. What compares times is alone.
test: lint
	@failed=0; set -x; \
	$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist worksteal -m "not live and not alone" \
	  $(if $(REPORTS),--junitxml=$(REPORTS)/together.xml) $(PYTEST_ARGS) || failed=1; \
	$(BIN)/python -m pytest -m "alone $(if $(TESTS_LIVE),or live)" \
	  $(if $(REPORTS),--junitxml=$(REPORTS)/alone.xml) $(PYTEST_ARGS) || failed=1; \
	exit $$failed

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.examples
	$(BIN)/python benchmarks/launch.py

bench-recovery: $(VENV)/.examples
	$(BIN)/python benchmarks/recovery.py $(if $(FT_LAUNCHER),--ft-launcher $(FT_LAUNCHER))

bench-overhead: $(VENV)/.examples
	$(BIN)/python benchmarks/overhead.py $(if $(TRACEML),--traceml $(TRACEML))

clean:
	rm -rf $(VENV) build dist gpulaunch-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find launcher profiler exporters tests deploy examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# Each stamp is touched when its step has succeeded, and is out of date when what it was made from changes.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpulaunch needs Python 3.11 or newer, and \
	$(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.examples: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e '.[examples,top,web]'
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e '.[test,examples]'
	@touch $@
