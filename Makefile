# Recipes for people and for CI; `make help` lists them. Python 3.11 or later, and nothing else, must be there.

PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
# Container images often set it: each process of the tests would then compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test quick matrix browser world soak bench scale lint format messages docs pages adopt wheel lock clean

help: ## List the recipes
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# One stamp a dependency group: installing again only when pyproject.toml changed.
$(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group $*
	@touch $@

demo: $(VENV)/.demo ## Serve the example project with an embedded Redis on port PORT (default 8000)
	@exec $(BIN)/python manage.py demo --port $(PORT)

test: $(VENV)/.test ## Run the whole test suite in parallel (ARGS="-k name" for a part of it, ARGS=--hypothesis-profile=thorough)
	@$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

quick: $(VENV)/.test ## Run most tests: no processes, no servers that are killed or frozen
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

$(VENV)-matrix/.matrix: pyproject.toml
	@test -x $(VENV)-matrix/bin/python || $(PYTHON) -m venv $(VENV)-matrix
	@$(VENV)-matrix/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(VENV)-matrix/bin/python -m pip install --quiet --disable-pip-version-check --group matrix
	@touch $@

matrix: $(VENV)-matrix/.matrix ## Run a part of the suite on every supported version that is here (ENV=leg,leg ARGS=...)
	@ENV=$(ENV) tests/matrix.sh $(ARGS)

browser: ## Run the browser tests, with Chromium and the newest Python here (ARGS="-k name", ARGS=--screenshots)
	@tests/browser.sh $(ARGS)

# An environment of its own: the servers and workers that projects run.
$(VENV)-world/.world: pyproject.toml
	@test -x $(VENV)-world/bin/python || $(PYTHON) -m venv $(VENV)-world
	@$(VENV)-world/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(VENV)-world/bin/python -m pip install --quiet --disable-pip-version-check --editable . --group world
	@touch $@

world: $(VENV)-world/.world ## Run the package in real servers and workers, through forks, signals and kills (ARGS="-k uwsgi")
	@$(VENV)-world/bin/python -m pytest -n 2 --dist worksteal tests/world $(ARGS)

soak: $(VENV)/.test ## Ten minutes of mixed load with random faults (SECONDS=600)
	@$(BIN)/python -W error::ResourceWarning -m tests.faults.soak $(or $(SECONDS),600)

# An environment of its own: other rate limiters, to be measured beside this one.
$(VENV)-bench/.bench: pyproject.toml
	@test -x $(VENV)-bench/bin/python || $(PYTHON) -m venv $(VENV)-bench
	@$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --editable . --group bench
	@touch $@

bench: $(VENV)-bench/.bench ## Measure it beside other packages, into benchmarks/RESULTS.md (ARGS="one_decision --quick")
	@$(VENV)-bench/bin/python -m benchmarks $(ARGS)

scale: $(VENV)/.test ## Time the admin's pages with 100,000 policies and a million users, into benchmarks/SCALE.md (DATABASE=postgresql, ARGS="--serve 8000")
	@$(if $(DATABASE),tests/$(DATABASE).sh) $(BIN)/python -m benchmarks.scale $(ARGS)

lint: $(VENV)/.lint ## Check style, types, imports, migrations and the example project
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@DATABASE_URL=sqlite://:memory: $(BIN)/python manage.py makemigrations --check --dry-run
	@$(BIN)/python manage.py check

format: $(VENV)/.lint ## Bring the code into shape
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

# Without line numbers and line breaks, which would change with every edit of the code.
messages: $(VENV)/.demo ## Collect and compile the texts that are translated (needs GNU gettext)
	@cd django_ratequota && $(abspath $(BIN))/python ../manage.py makemessages --locale de \
		--no-location --no-wrap --no-obsolete
	@cd django_ratequota && $(abspath $(BIN))/python ../manage.py compilemessages --locale de

docs: $(VENV)/.docs ## Build the documentation as a site in docs/_build; warnings are errors
	@$(BIN)/sphinx-build --builder html --fail-on-warning --keep-going --nitpicky --quiet docs docs/_build

pages: $(VENV)/.test ## Write what the pages take from the code anew: tables of settings, commands and fields, plots
	@$(BIN)/python -m docs.generate

adopt: ## Run other projects' tests with the app and without, and compare what fails (NETBOX=clone PLANE=clone ARGS="users core")
	@$(if $(NETBOX)$(PLANE)$(BASEROW),tests/postgresql.sh) tests/adopt/run.sh $(ARGS)

wheel: ## Build sdist and wheel, install them in an empty environment and use them there (BUILT=folder has them already)
	@PYTHON=$(PYTHON) BUILT=$(BUILT) tests/wheel.sh

lock: $(VENV)-matrix/.matrix ## Write the versions and hashes of what builds a release into .github/release.txt
	@$(VENV)-matrix/bin/uv pip compile --quiet --upgrade --group release --generate-hashes --no-header --no-annotate \
		--python-version 3.13 --python-platform linux --output-file .github/release.txt

clean: ## Remove what the recipes made
	@rm -rf $(VENV) .venv-browser $(VENV)-adopt $(VENV)-bench $(VENV)-matrix $(VENV)-world .tox dist build docs/_build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
