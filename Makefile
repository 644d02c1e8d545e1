# make demo    see it work: a virtual environment, an install, and a training run
# make observe   a longer one, with Prometheus and its alerts: says where to look at it
# make test    everything that must hold: lint, types, and the whole test suite
# make lint    the first part of it
# make test-newest   what torch's inside matters to, with the newest torch, in a virtual environment of its own
# make lock    write requirements.lock anew, and the image's: what is installed, by hashes
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

# Each of some thousands of processes would compile all that it imports of ours, a fifth of what it costs to start.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)

# Four ranks where there are four cores; on a machine with GPUs no more than one each, but two to have company.
CORES := $(shell nproc 2>/dev/null || echo 2)
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ')
RANKS ?= $(shell n=2; [ $(CORES) -ge 4 ] && n=4; \
	[ $(GPUS) -gt 0 ] && [ $(GPUS) -lt $$n ] && n=$(GPUS); [ $$n -lt 2 ] && n=2; echo $$n)

.PHONY: help demo observe test lint install-newest test-newest lock bench bench-recovery bench-overhead clean

help:
	@sed -n '/^# /s/^# //p;/^$$/q' Makefile

demo: $(VENV)/.examples
	$(BIN)/gpulaunch --nproc $(RANKS) examples/digits_ddp.py

observe: $(VENV)/.examples
	@$(BIN)/python deploy/observe/observe.py --nproc $(RANKS)

# Most tests wait for processes: two at a time take a little more than half as long. What compares times is alone, and
# so is what Prometheus takes minutes for: beside others it took four times as long, and failed. What compares times of
# programs that wait is beside others of its kind, and alone if that fails.
# Of thousands of tests beside each other one now and then does not get its turn in time: up to four that fail are
# asked again, alone, and the output names them; a race is to be looked for, as after any failure.
TOGETHER := not live and not light and not alone
MOST_AGAIN := 4
PYTEST = $(BIN)/python -m pytest $(PYTEST_ARGS)
junit = $(if $(REPORTS),--junitxml=$(REPORTS)/$(1).xml)

test: lint
	@failed=0; set -x; \
	$(PYTEST) -n $(TESTS_AT_ONCE) --dist worksteal -m "$(TOGETHER)" --cache-clear $(call junit,together) || \
	  { [ "$$(grep -c :: .pytest_cache/v/cache/lastfailed)" -le $(MOST_AGAIN) ] \
	  && $(PYTEST) -n 1 -m "$(TOGETHER)" --last-failed --last-failed-no-failures none \
	  $(call junit,together-again); } || failed=1; \
	$(PYTEST) -m light -n $(TESTS_AT_ONCE) --dist worksteal $(call junit,light) || \
	  $(PYTEST) -m light -n 1 --last-failed $(call junit,light-again) || failed=1; \
	$(if $(TESTS_LIVE),$(PYTEST) -m live $(call junit,live) || \
	  $(PYTEST) -m live --last-failed $(call junit,live-again) || failed=1;) \
	$(PYTEST) -m alone $(call junit,alone) || failed=1; \
	exit $$failed

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# Whatever `pip install torch` gives today. An index that has none is an error: skipped, it would never be noticed.
NEWEST := .venv-newest
NEWEST_TESTS := tests/loop tests/agent/test_restart.py tests/compat tests/job/test_numa.py tests/job/test_parse.py \
  $(addprefix tests/probe/test_, collectives.py frameworks.py inject.py step.py teardown.py)

install-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) $(LOCKED)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) $(OURSELVES)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --upgrade torch
	@$(NEWEST)/bin/python -c 'from importlib.metadata import version; print("the newest torch:", version("torch"))'

test-newest: install-newest
	$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS) -n $(TESTS_AT_ONCE) --dist worksteal -m "not live and not alone" \
	  $(call junit,newest) $(NEWEST_TESTS)

# uv reads the index and hashes every file of each version: of x86_64 and aarch64, for Python 3.11 and newer. `editables`
# is what hatchling needs for an installation in place.
OF_TORCH := torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc \
  cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
  --constraint constraints.txt $(addprefix --no-emit-package ,$(OF_TORCH))

lock: $(VENV)/.made
	$(PIP) uv
	echo editables | $(COMPILE) --extra test --extra examples --output-file requirements.lock pyproject.toml -
	echo hatchling | $(COMPILE) --extra examples --output-file deploy/docker/requirements.lock pyproject.toml -

bench: $(VENV)/.examples
	$(BIN)/python benchmarks/launch.py

bench-recovery: $(VENV)/.examples
	$(BIN)/python benchmarks/recovery.py $(if $(FT_LAUNCHER),--ft-launcher $(FT_LAUNCHER))

bench-overhead: $(VENV)/.examples
	$(BIN)/python benchmarks/overhead.py $(if $(TRACEML),--traceml $(TRACEML))

clean:
	rm -rf $(VENV) $(NEWEST) build dist gpulaunch-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
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

# torch comes first and has no hash: which file 2.13.0 is depends on the index (CUDA's or the CPU's), and the packages
# with CUDA's libraries come with it. All else is what requirements.lock says, and nothing more.
LOCKED = --require-hashes --no-deps -r requirements.lock
OURSELVES = --no-deps --no-build-isolation -e .

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt requirements.lock
	$(PIP) -c constraints.txt torch
	$(PIP) $(LOCKED)
	$(PIP) $(OURSELVES)
	@touch $@
