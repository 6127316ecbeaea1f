# make demo: compare MAML with Sharp-MAML on letters that need no download (about three minutes after set-up)
# make test: lint, types, tests (JOBS=8: in so many processes)

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# mypy cannot see that tasks/ is metasam.tasks: it is shown the package as it installs
TYPED := build/typed
SET_UP := $(VENV)/.set-up

.PHONY: demo test lint setup

demo: $(SET_UP)
	$(BIN)/python scripts/demo.py

test: $(SET_UP) lint
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

lint: $(SET_UP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/metasam
	ln -s $(CURDIR)/metasam/* $(CURDIR)/tasks $(CURDIR)/configs $(CURDIR)/scripts $(TYPED)/metasam/
	cd $(TYPED) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

setup: $(SET_UP)

# runs again only when what is installed changes
$(SET_UP): pyproject.toml requirements-peers.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	$(BIN)/python -m pip install --quiet -r requirements-peers.txt || { \
	  echo; \
	  echo "*** learn2learn could not be built. Nothing but the comparison with it needs it; that test is skipped. ***"; \
	  echo; }
	touch $@
