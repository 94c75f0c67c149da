# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv and install what they need.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-peers check bench comparison docs dist clean help

help:
	@echo "make demo   a training that loses a rank and hangs, and finishes all the same (under 3 minutes)"
	@echo "make test   all tests of rsup (make test-peers: that torchrun still has the faults it is said to have)"
	@echo "make check  formatting, lint, types"
	@echo "make bench  benchmarks with their peers (minutes)"
	@echo "make comparison   public complaints about launchers, each run with torchrun and rsup (minutes)"
	@echo "make docs   the pages made from the code"
	@echo "make dist   wheel and sdist"

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "rsup needs Python 3.11 or newer; say which with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,postgres,dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/rsup demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not peer"

test-peers: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) -m peer

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/mypy & mypy=$$!; $(BIN)/pyright --pythonpath $(BIN)/python; pyright=$$?; wait $$mypy && exit $$pyright

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench

comparison: $(INSTALLED)
	$(BIN)/python -m tests.compat.comparison

docs: $(INSTALLED)
	$(BIN)/python -m rsup.launcher.options_page > docs/options.md
	$(BIN)/python -m rsup.supervisor.settings_page > docs/serve.md

dist: $(INSTALLED)
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) .editable dist demo-run
