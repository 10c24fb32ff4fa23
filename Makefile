# make quickstart   train, resume and sample a small GPT from raw text on this machine's CPU
# make finetune     make a small GPT that continues text answer questions, on this machine's CPU
# make test         ruff, mypy, and the same tests each time: 8 minutes on two cores. None needs a GPU
# make test-rest    the costly tests that `make test` leaves out: 30 minutes more
# make test-all     all tests, with more cases and all steps of the layout grid, and whole products: much longer
# make gpu          steps on one GPU beside plain torch, in nine minutes; into $OUT/gpu-headline.json. CALL=truth runs the
#                   tests, CALL=rest kernels, long sequences and checkers, each in nine minutes more; CALL="headline
#                   truth rest" all. Runs with python3 as it is, without network: no .venv. PYTHON=... chooses another
# make lint         ruff, which fixes what it can and formats, and mypy
# make docs         regenerate docs/reference/flags.md and the notebook of the tutorial
# make site         build the documentation site, build/site/index.html, and check its links; one minute
# make clean        remove the virtual environment, the build and the quickstart's files
#
# All other targets run in the virtual environment .venv. For your own commands activate it: source .venv/bin/activate

PYTHON ?= python3
VENV   ?= .venv
CALL   ?= headline
BIN    := $(VENV)/bin

# Tests start many interpreters: what the first one compiles of the installed packages the others read.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: quickstart finetune test test-rest test-all gpu lint docs site clean

quickstart: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" bash examples/gpt_tiny_cpu.sh

finetune: $(VENV)/.installed-chat
	PATH="$(abspath $(BIN)):$$PATH" bash examples/finetune_cpu.sh

test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(PYTEST) -m "not rest"

test-rest: $(VENV)/.installed-test
	$(PYTEST) -m rest

test-all: $(VENV)/.installed-test
	MEGATRON_DS_TEST_ALL=1 $(PYTEST)

# Neither network nor installation: the checkout, and a python3 with torch, transformers, pytest and hypothesis.
gpu:
	$(PYTHON) benchmarks/gpu_day.py --part $(CALL)

lint: $(VENV)/.installed-test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python -m mypy

docs: $(VENV)/.installed
	$(BIN)/python tools/write_flags_doc.py
	$(BIN)/python tools/write_notebook.py

site: $(VENV)/.installed-site
	$(BIN)/python tools/build_site.py

clean:
	rm -rf $(VENV) build *.egg-info quickstart finetune tutorial

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[report]"
	touch $@

# One installation, since each compiles the extensions anew.
$(VENV)/.installed-chat: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[report,chat]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-site: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[site]"
	touch $@

# --no-compile: most modules of the installed packages are never imported.
$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[test]"
	touch $@
