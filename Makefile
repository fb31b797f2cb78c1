# make demo: set everything up and run the main job. make test: set everything up and pass the tests.
# make mutations: put faults into copies of the tree, which the tests must notice.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
READY := $(VENV)/.ready
CORE := CMakeLists.txt $(wildcard spec_compile/ngram/*.h spec_compile/ngram/*.cpp)

.PHONY: demo test test-all mutations lint bench setup clean

demo: setup
	$(VENV)/bin/python examples/demo.py

test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/python -m pytest -m "not gpu and not slow" -n $(WORKERS)

test-all: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/python -m pytest -m "not gpu" -n $(WORKERS)

mutations: setup
	$(VENV)/bin/python tests/mutations.py --workers $(WORKERS)

lint: setup
	$(VENV)/bin/ruff check .

bench: setup
	$(VENV)/bin/python benchmarks/cpu.py

setup: $(READY)

$(READY): pyproject.toml $(CORE)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build
