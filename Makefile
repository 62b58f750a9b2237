# make book   the rendered book, every chapter run        make serve   the same, in a browser
# make test   everything that is checked                  make clean   forget what was made
# make benchmark   our speed compared with that of others, on this machine
# make epub   the first part as an EPUB, for readers and tablets
# make coverage    which lines of the package the tests run
# make lock   requirements.txt, after a change to pyproject.toml

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
# The Pythons for which the lock holds.
FITS    := import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 14) else 'This Python is %d.%d, and 3.10 to 3.14 would do: make PYTHON=python3.12' % sys.version_info[:2])
PORT    ?= 8000
# One worker for each processor, one thread for each worker.
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
TESTS   := tests book
# The long ones run with the other tests.
HOUSE   := $(filter-out tests/house/test_colab.py tests/house/test_packaging.py, $(wildcard tests/house/test_*.py))
RUN     := env OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONHASHSEED=0
PIP     := $(BIN)/python -m pip --quiet --disable-pip-version-check
UV      := $(BIN)/uv --quiet pip
LOCKED  := --require-hashes --no-deps -r requirements.txt
THIS    := --no-deps --no-build-isolation -e .
UNUSED  := /(tests|testing|mypyc?|fontTools|networkx)/|/transformers/models/
JB      := $(RUN) $(BIN)/jupyter-book build . --quiet
SERVE   := $(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html

.PHONY: book epub test serve site links benchmark lowest lock clean export lint types unit coverage house pages strict browser help

help:
	@sed -n '1,6p' Makefile

# What the lock names, by its hashes; PyTorch and what its build needs; the project itself. Then all must fit together.
# uv, itself of the lock, takes seconds where pip takes half a minute, but it does not read pip's settings, so pip
# is there if it fails.
# Modules are compiled on all processors, but for some that are seldom or never imported.
# An environment that was half made, or whose Python has gone, is made again.
$(shell test -x $(BIN)/python || rm -f $(READY))
$(READY): requirements.txt requirements-torch.txt pyproject.toml
	@$(BIN)/python -c "import pip; $(FITS)" 2>/dev/null || { $(PYTHON) -c "$(FITS)" && $(PYTHON) -m venv --clear $(VENV); }
	@awk '/^[a-z]/ {own = /^uv==/} own' requirements.txt > $(VENV)/uv.txt
	-@$(PIP) install --require-hashes --no-deps -r $(VENV)/uv.txt
	$(UV) install --python $(BIN)/python $(LOCKED) || $(PIP) install --no-compile $(LOCKED)
	$(PIP) install --no-compile -r requirements-torch.txt
	@$(BIN)/python -m compileall -q -j $(WORKERS) -x '$(UNUSED)' $(VENV)/lib >/dev/null 2>&1 || true
	$(UV) install --python $(BIN)/python $(THIS) || $(PIP) install $(THIS)
	@$(UV) check --python $(BIN)/python || $(PIP) check
	@touch $@

book: $(READY)
	@$(BIN)/python book/_ext/export.py
	@stale=$$($(BIN)/python book/_ext/execution.py); if [ -n "$$stale" ]; then \
	  echo "running:" $$stale; $(RUN) $(BIN)/python -m pytest -q -n $(WORKERS) $$stale; fi
	@$(JB)
	@echo "The book is ready: file://$(CURDIR)/_build/html/index.html"

serve: book
	@echo "http://127.0.0.1:$(PORT)/ (stop with Ctrl-C)"
	@$(SERVE) $(PORT)

# The pages, with the notebooks beside them, which install from $BOOK_REPOSITORY_URL on Colab.
site: book
	@$(BIN)/python book/_ext/export.py --publish _build/html
	@touch _build/html/.nojekyll

links: book
	$(JB) --builder linkcheck

benchmark: $(READY)
	@$(BIN)/python -m benchmarks

epub: book
	@$(BIN)/python book/_ext/epub.py

# The strict build keeps one processor busy for a while: types, and the quick tests of the house, run beside it.
test: TESTS = tests book $(HOUSE:%=--ignore=%)
test: $(READY) export lint unit pages browser
	@echo "All checks passed."

# The steps of `make test`, in this order (they are not meant to run side by side).
.NOTPARALLEL:

export: $(READY)
	$(BIN)/python book/_ext/export.py --check

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --exclude '*.ipynb' .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(RUN) $(BIN)/python -m pytest -q -n $(WORKERS) --no-loadscope-reorder --durations=15 \
	  $(COVERAGE) --ignore=tests/browser $(TESTS)

# Measuring coverage takes the tests a quarter longer.
coverage: COVERAGE = --cov=annotated_transformer
coverage: unit

house: $(READY)
	$(RUN) $(BIN)/python -m pytest -q $(HOUSE)

pages: $(READY)
	@$(MAKE) strict & build=$$!; $(MAKE) types & kinds=$$!; $(MAKE) house; beside=$$?; \
	  wait $$build && wait $$kinds && exit $$beside

strict: $(READY)
	rm -rf _build/html _build/.doctrees
	$(JB) -W -n --keep-going

# A worker waits for its browser a part of the time, so there is one more.
browser: $(READY)
	$(RUN) $(BIN)/python -m pytest -q -rs -n $$(($(WORKERS) + 1)) --dist=load --durations=10 tests/browser

# A part of the tests with the lowest versions that pyproject.toml names, in an environment of its own.
lowest: $(READY)
	$(BIN)/python tests/lowest.py --workers $(WORKERS)

# The lock after a change to pyproject.toml; UPGRADE=--upgrade takes newer versions of everything.
lock:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import uv" 2>/dev/null || $(PIP) install uv
	@$(BIN)/python tests/lock.py $(UPGRADE)

clean:
	rm -rf _build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
