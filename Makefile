# Two commands do everything on a fresh machine with Python 3.11 or newer: make demo, make test.
PYTHON ?= python3
# notebooks are executed by make test-all only, and only it installs Jupyter and lm-eval
comma := ,
EXTRAS ?= test$(if $(filter test-all,$(MAKECMDGOALS)),$(comma)examples)
VENV := .venv
BIN := $(VENV)/bin
# one for each choice of extras, so that another choice is installed when it is asked for
TESTED := $(VENV)/tested-$(EXTRAS)
# modules are compiled when they are first imported, and that is kept, whatever the environment prefers: compiling all
# that is installed would take as long as the rest of the install
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick test test-all test-gpu explore lint bench docs clean

# seconds of training of each of its four programs
SECONDS := 34
demo: $(VENV)/installed
	@$(BIN)/python demo/demo.py $(SECONDS)

# one more worker than cores, since tests of several processes often wait; one thread for each, which would fight otherwise
WORKERS := $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() + 1, 8))")
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

# what a change of one technique needs, such as make quick TECHNIQUE=adapters.lora; without it, of all a part
TECHNIQUE :=
OWN := test_$(lastword $(subst ., ,$(TECHNIQUE)))
quick: $(TESTED) lint
ifdef TECHNIQUE
	$(PYTEST) -n $(WORKERS) --all tests/contract tests/pairs $(wildcard tests/techniques/$(OWN).py) -k "$(TECHNIQUE) or $(OWN)"
else
	$(PYTEST) tests/core tests/contract -k "core or card or toml or stage or seams or order or refuses"
endif

# collected once beside lint, so that the workers find every module compiled
test: $(TESTED)
	$(PYTEST) --collect-only >/dev/null 2>&1 & $(MAKE) --no-print-directory lint; linted=$$?; wait; exit $$linted
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations=25

# every test and every entry of large tables, folder by folder; a folder that passed is run again after a change only
STATE := $(shell git ls-files -z --cached --others --exclude-standard 2>&1 | xargs -0 sha1sum 2>&1 | sha1sum | cut -c1-16)
FOLDERS := $(filter-out support __pycache__,$(patsubst tests/%/,%,$(wildcard tests/*/))) test_import_rule.py
test-all: $(TESTED) lint $(FOLDERS:%=$(VENV)/passed/$(STATE)/%)

$(VENV)/passed/$(STATE)/%: $(TESTED)
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations=25 --all tests/$*
	mkdir -p $(@D) && touch $@

# what only a GPU can show, and every technique alone and in company, on it
test-gpu: $(TESTED)
	THRIFTY_TEST_DEVICE=cuda $(PYTEST) -n $(WORKERS) --dist worksteal tests/gpu tests/contract tests/pairs tests/kernels

explore: $(TESTED)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "hypothesis and not slow" --hypothesis-profile=explore

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

bench: $(TESTED)
	export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=1000; for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done; \
	$(BIN)/python benchmarks/bench_trainer.py --preset llama-nano --vocabulary 4096 && \
	$(BIN)/python benchmarks/bench_trainer.py --preset llama-micro --length 256 --batch 32 --vocabulary 4096

# offline, once the packages are installed; every warning is an error, such as a link that leads nowhere
docs: $(VENV)/documented
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[demo]'
	touch $@

$(VENV)/documented: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[docs]'
	touch $@

$(TESTED): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build docs/generated .pytest_cache .ruff_cache .hypothesis .import_linter_cache
