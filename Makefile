PYTHON ?= python3
# Where the CPU build of torch comes from when pip's own configuration does not offer it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

types:
	@mkdir -p build/types/gradeloom
	@for d in flows tasks schemas; do ln -sfn $(CURDIR)/$$d build/types/gradeloom/$$d; done
	MYPYPATH=build/types .venv/bin/mypy --explicit-package-bases -p gradeloom.schemas -p gradeloom.tasks -p gradeloom.flows
.PHONY: types
