# make lab    environment, build, JupyterLab on the first lab
# make test   the whole test suite
# Choose another Python with `make lab PYTHON=python3.12`; add pip's options with PIP_FLAGS=...
PYTHON ?= python3
VENV ?= .venv
JUPYTER_FLAGS ?=
# Two workers; the tests of one file stay together, since they share servers and courses.
PYTEST_FLAGS ?= -n 2 --dist loadfile
LAB ?= 00_memory
BIN := $(VENV)/bin
PIP_FLAGS ?=
# Instructors' notebooks import autograder, which no wheel holds.
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := lab
.PHONY: lab test check bench build demo clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Python %d.%d: the labs want 3.11, 3.12 or 3.13 (make lab PYTHON=python3.12)" % v)'
	$(PYTHON) -m venv $(VENV)

# A stamp per set of extras: an install is repeated only when what it installs from has changed.
$(VENV)/.lab: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[grader]'
	@touch $@

$(VENV)/.dev: $(VENV)/.lab
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

build: $(VENV)/.lab
	$(BIN)/python -m autograder build

# The learner works on copies in work/, which no later build or update touches.
lab: build
	@mkdir -p work && cp -Rn notebooks/release/. work/ || true
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.default_url=/lab/tree/work/$(LAB)/$(LAB).ipynb $(JUPYTER_FLAGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/python -m autograder check

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks

demo: $(VENV)/.lab
	$(BIN)/python -m autograder grade --demo --jobs 2

clean:
	rm -rf build .pytest_cache .ruff_cache
