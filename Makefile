# `make demo` and `make test` create the environment that they need in .venv; later calls reuse it.
PYTHON ?= python3
BIN    := .venv/bin

# Tests start many processes: bytecode that is kept saves each of them seconds.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: demo page test types tests test-fast test-long fuzz lint format bench omniglot paper clean

BUILT := src/bruno/page/built/page.json
demo: .venv/.ready ## install, train on digits and show what the models can do
	@if [ ! -e $(BUILT) ] && command -v npm > /dev/null; then $(MAKE) -s page || true; fi
	@$(BIN)/python -m bruno demo

page: .venv/.ready ## build the page that runs a model in the browser; needs npm
	npm ci --prefix src/bruno/page --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m bruno.page.build

test: lint ## what CI runs: lint, types, all tests but those marked long
	@$(MAKE) --no-print-directory --jobs 2 types tests

types: .venv/.ready
	$(BIN)/mypy

tests: .venv/.ready
	$(PYTEST)

test-fast: export JAXTYPING_DISABLE = 1
test-fast: .venv/.ready ## only the quick tests, without shape checks
	$(PYTEST) -m 'not slow and not long'

test-long: .venv/.ready ## all tests, including those marked long
	$(PYTEST) -m ''

MINUTES ?= 10
fuzz: .venv/.ready ## mutated files for every reader, for MINUTES=10
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES)

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready ## measure the tables of results/ on this machine
	$(BIN)/python benchmarks/process.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/fewshot.py
	$(BIN)/python benchmarks/missing_cells.py
	$(BIN)/python benchmarks/streams.py
	$(BIN)/python benchmarks/ray_cluster.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/pretrained.py
	$(BIN)/python benchmarks/estimators.py

omniglot: .venv/.ready ## reproduce results/omniglot/ with BRUNO_DATA=DIR: hours, on a GPU
	$(BIN)/python benchmarks/omniglot.py

paper: .venv/.ready ## reproduce results/paper/ with BRUNO_DATA=DIR: hours, on a GPU
	$(BIN)/python benchmarks/paper.py

# constraints.txt pins the version of every package, so that all machines install the same ones.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
