# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# PY chooses the interpreter, VENV_FLAGS and CONSTRAINTS are for machines that bring their own torch:
#   make test VENV_FLAGS=--system-site-packages CONSTRAINTS=/dev/null

PY ?= python3
VENV_FLAGS ?=
CONSTRAINTS ?= constraints.txt
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest

.PHONY: quickstart test check test-full lint clean

quickstart: .venv/.installed
	.venv/bin/python tools/quickstart.py

test: .venv/.installed lint
	$(PYTEST) -m "not slow and not gpu" --durations=10

check: .venv/.installed lint
	$(PYTEST) -m "not slow and not gpu" tests/unit

test-full: .venv/.installed lint
	$(PYTEST) --durations=20

lint: .venv/.installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

.venv/.installed: pyproject.toml constraints.txt
	$(PY) -m venv $(VENV_FLAGS) .venv
	.venv/bin/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info runs
