# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# PY chooses the interpreter, VENV_FLAGS and CONSTRAINTS are for machines that bring their own torch:
#   make test VENV_FLAGS=--system-site-packages CONSTRAINTS=/dev/null
# EXTRAS names the optional dependencies to install; with interop, the tests compare with megatron-core:
#   make test EXTRAS=test,interop

PY ?= python3
VENV_FLAGS ?=
CONSTRAINTS ?= constraints.txt
EXTRAS ?= test
# One stamp for each choice of extras, so that another choice installs what it adds.
COMMA := ,
INSTALLED = .venv/.installed.$(subst $(COMMA),+,$(EXTRAS))
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest

.PHONY: quickstart test check test-full lint clean

quickstart: $(INSTALLED)
	.venv/bin/python tools/quickstart.py

test: $(INSTALLED) lint
	$(PYTEST) -m "not slow and not gpu" --durations=10

check: $(INSTALLED) lint
	$(PYTEST) -m "not slow and not gpu" tests/unit

test-full: $(INSTALLED) lint
	$(PYTEST) --durations=20

lint: $(INSTALLED)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

$(INSTALLED): pyproject.toml constraints.txt
	$(PY) -m venv $(VENV_FLAGS) .venv
	.venv/bin/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv build *.egg-info runs
