# Needs make and Python 3.10 or newer; `make demo PYTHON=python3.12` chooses the interpreter.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
export PIP_NO_COMPILE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo smollm2 test test-slow test-integrations lint clean venv

demo: $(VENV)/train.stamp
	$(VENV)/bin/potstill train recipes/arithmetic.yaml

smollm2: $(VENV)/train.stamp
	$(PY) scripts/smollm2.py
	$(VENV)/bin/potstill train recipes/smollm2.yaml

test: $(VENV)/dev.stamp
	$(PY) -m pytest -n 2

test-slow: $(VENV)/dev.stamp
	$(PY) -m pytest -n 2 -m slow

# Against the real frameworks, in environments of their own.
test-integrations:
	scripts/integrations.sh $(PYTHON)
	.venvs/verl/bin/python -m pytest --disable-warnings tests/integrations

lint: $(VENV)/dev.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV)

# A stamp is touched after its installation has succeeded, and is stale when the requirements change.
$(VENV)/train.stamp: pyproject.toml constraints.txt
	$(PY) -m pip install -q -c constraints.txt -e '.[train]'
	touch $@

# The dev extra contains the train extra.
$(VENV)/dev.stamp: pyproject.toml constraints.txt
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(VENV)/train.stamp $@

# pip stops working where .venv is missing or half made, its Python is gone, or the folder was moved: then start anew.
ifneq ($(shell $(VENV)/bin/pip --version >/dev/null 2>&1 || echo broken),)
$(VENV)/train.stamp $(VENV)/dev.stamp: venv
endif

venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "potstill needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
