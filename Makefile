# make quickstart   from raw text to a trained, resumed and sampled GPT on this machine's CPU
# make test         everything that needs no GPU, in ten to fifteen minutes on two cores, installing included
# make test-all     the same with the whole layout-equivalence grid

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: quickstart test test-all lint docs clean

quickstart: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" bash examples/gpt_tiny_cpu.sh

test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 MEGATRON_DS_TEST_ALL=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .

docs: $(VENV)/.installed
	$(BIN)/python tools/write_flags_doc.py

clean:
	rm -rf $(VENV) build *.egg-info quickstart

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[report]"
	touch $@

# Not compiled, as most modules of what is installed are never imported.
$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[test]"
	touch $@
