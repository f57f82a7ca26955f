# `make demo` and `make test` set up everything they need in .venv; the second time they find it there.
PYTHON ?= python3
BIN    := .venv/bin

PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: demo test test-fast test-long lint format bench omniglot clean

demo: .venv/.ready ## the main job, from nothing
	@$(BIN)/python -m bruno demo

test: lint ## what CI runs: lint, types, all tests but those marked long
	$(BIN)/mypy
	$(PYTEST)

test-fast: .venv/.ready ## only the tests that take less than about 2 seconds each
	$(PYTEST) -m 'not slow and not long'

test-long: .venv/.ready ## all tests, those marked long included
	$(PYTEST) -m ''

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready ## the tables of results/, measured again on this machine
	$(BIN)/python benchmarks/process.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/fewshot.py

omniglot: .venv/.ready ## results/omniglot/ from BRUNO_DATA=DIR on: hours, on a GPU
	$(BIN)/python benchmarks/omniglot.py

# Pinned versions: constraints.txt names every package, so that two machines install the same ones.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
