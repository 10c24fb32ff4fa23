# make quickstart   train, resume and sample a small GPT from raw text on this machine's CPU
# make finetune     make a small GPT that continues text answer questions, on this machine's CPU
# make test         ruff and the tests that need no GPU, of costly ones a part: 12 to 25 minutes on two cores
# make test-all     all parts, with more cases and all steps of the layout grid, and whole products
# make gpu          steps on one GPU beside plain torch, in nine minutes; into $OUT/gpu-headline.json. CALL=truth runs the
#                   tests, CALL=rest kernels, long sequences and checkers, each in nine minutes more; CALL="headline
#                   truth rest" all. Runs with python3 as it is, without network: no .venv. PYTHON=... chooses another
# make lint         ruff: fixes what it can, and formats
# make docs         regenerate docs/reference/flags.md
# make clean        remove the virtual environment, the build and the quickstart's files
#
# All other targets run in the virtual environment .venv. For your own commands activate it: source .venv/bin/activate

PYTHON ?= python3
VENV   ?= .venv
CALL   ?= headline
BIN    := $(VENV)/bin

# The part of the costly tests that `make test` runs: another one each day. `make test PART=331` repeats one.
PART := $(shell date +%j)

# Tests start many interpreters: what the first one compiles of the installed packages the others read.
IN_TESTS := PYTHONDONTWRITEBYTECODE=

.PHONY: quickstart finetune test test-all gpu lint docs clean

quickstart: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" bash examples/gpt_tiny_cpu.sh

finetune: $(VENV)/.installed-chat
	PATH="$(abspath $(BIN)):$$PATH" bash examples/finetune_cpu.sh

test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(IN_TESTS) OMP_NUM_THREADS=1 MEGATRON_DS_TEST_PART=$(PART) $(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/.installed-test
	$(IN_TESTS) OMP_NUM_THREADS=1 MEGATRON_DS_TEST_ALL=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Neither network nor installation: the checkout, and a python3 with torch, transformers, pytest and hypothesis.
gpu:
	$(PYTHON) benchmarks/gpu_day.py --part $(CALL)

lint: $(VENV)/.installed-test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(VENV)/.installed
	$(BIN)/python tools/write_flags_doc.py

clean:
	rm -rf $(VENV) build *.egg-info quickstart finetune

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[report]"
	touch $@

# One installation, since each compiles the extensions anew.
$(VENV)/.installed-chat: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[report,chat]"
	touch $@ $(VENV)/.installed

# --no-compile: most modules of the installed packages are never imported.
$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[test]"
	touch $@
