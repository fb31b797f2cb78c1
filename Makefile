# make demo: set everything up and run the main job. make test: set everything up and pass the tests.
# make test-all: also the long sweeps. make lint: the linter, the formatter and the type checker.
# make docs: build the site into build/site. make wheel: build a wheel into dist.
# make mutations: put faults into copies of the tree, which the tests must notice. make bench: the benchmark on a CPU.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
READY := $(VENV)/.ready
CORE := CMakeLists.txt $(wildcard spec_compile/ngram/*.h spec_compile/ngram/*.cpp spec_compile/kernels/*.h spec_compile/kernels/*/*.h spec_compile/kernels/*/*.cpp spec_compile/contrib/kernels/*.h spec_compile/contrib/kernels/*.cpp)

# All caches of a clone lie in the clone. Compiled Python is kept also if the environment says to keep none: otherwise
# each process compiles torch and transformers anew, which takes 20 seconds. Inductor's code of a forced level has
# another folder, because torch does not tell it from that of the CPU's own level, and crashes.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/build/cache/inductor$(ATEN_CPU_CAPABILITY)
export TRITON_CACHE_DIR := $(CURDIR)/build/cache/triton
export SPEC_COMPILE_CACHE := $(CURDIR)/build/cache/artefacts

.PHONY: demo test test-all mutations lint docs wheel bench setup clean

demo: setup
	$(VENV)/bin/python -m spec_compile demo

test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/python -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist worksteal

test-all: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/python -m pytest -m "not gpu" -n $(WORKERS) --dist worksteal

mutations: setup
	$(VENV)/bin/python tests/mutations.py --workers $(WORKERS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: setup
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,docs]"
	$(VENV)/bin/python docs/options.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

wheel: setup
	$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

bench: setup
	$(VENV)/bin/python -m benchmarks.cpu

setup: $(READY)

$(READY): pyproject.toml $(CORE)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)" --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build
