# make quickstart   train, resume and sample a small GPT from raw text on this machine's CPU
# make finetune     make a small GPT that continues text answer questions, on this machine's CPU
# make test         ruff, mypy, and the same tests each time: 8 minutes on two cores. None needs a GPU
# make test-rest    the costly tests that `make test` leaves out: 30 minutes more
# make test-all     all tests, with more cases and all steps of the layout grid, and whole products: much longer
# make gpu          steps on one GPU beside plain torch, in nine minutes; into $OUT/gpu-headline.json. CALL=truth runs the
#                   tests, CALL=rest kernels, long sequences and checkers, each in nine minutes more; CALL="headline
#                   truth rest" all. Runs with python3 as it is, without network: no .venv. PYTHON=... chooses another
# make lint         ruff, which fixes what it can and formats, and mypy
#
# What the workflows in .github run, each alone:
# make style        ruff, which changes nothing
# make types        mypy
# make links        links between the pages, and to their headings
# make shard        one of several parts of the tests of `make test` and `make test-rest`: SHARD=3/8. TORCH=2.11 takes
#                   that version of torch
# make wheel        the source distribution and a wheel of this Python, into dist/
# make check-wheel  installs both where there is no compiler, and trains
# make check-tag    compares TAG=v0.3.0 with the version of the package
# make workflows    reads the workflows and forms in .github as GitHub does
# make site         build the documentation site, build/site/index.html, and check its links; one minute
#
# make docs         regenerate docs/reference/flags.md and the notebook of the tutorial
# make clean        remove the virtual environment, the build and the quickstart's files
#
# All other targets run in the virtual environment .venv. For your own commands activate it: source .venv/bin/activate

PYTHON ?= python3
VENV   ?= .venv
CALL   ?= headline
SHARD  ?= 1/1
TORCH  ?=
TAG    ?=
BIN    := $(VENV)/bin

# Tests start many interpreters: what the first one compiles of the installed packages the others read.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help quickstart finetune test test-rest test-all gpu lint docs site clean
.PHONY: style types links shard wheel check-wheel check-tag workflows

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

quickstart: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" bash examples/gpt_tiny_cpu.sh

finetune: $(VENV)/.installed-chat
	PATH="$(abspath $(BIN)):$$PATH" bash examples/finetune_cpu.sh

test: style types
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

style: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/python -m mypy

links: $(VENV)/.installed-test
	$(PYTEST) tests/docs/test_pages.py tests/docs/test_docs.py -k "link or every_page"

shard: $(VENV)/.installed-test
	$(if $(TORCH),$(BIN)/python -m pip install --quiet "torch==$(TORCH).*")
	$(PYTEST) --shard $(SHARD)

# A wheel for PyPI names the oldest glibc that it runs with, which auditwheel finds out.
wheel: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --outdir build/wheels .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheels/*.whl
	cp build/wheels/*.tar.gz dist

check-wheel:
	$(PYTHON) .ci/check_wheel.py dist

check-tag:
	@version=v$$($(PYTHON) -c 'import runpy; print(runpy.run_path("megatron_ds/version.py")["__version__"])'); \
	test "$(TAG)" = "$$version" || { echo "TAG is '$(TAG)', and the version of the package $$version"; exit 1; }

workflows: $(VENV)/.installed-dev
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --config .github/zizmor.yml .github

docs: $(VENV)/.installed
	$(BIN)/python tools/write_flags_doc.py
	$(BIN)/python tools/write_notebook.py

site: $(VENV)/.installed-site
	$(BIN)/python tools/build_site.py

clean:
	rm -rf $(VENV) build dist *.egg-info quickstart finetune tutorial

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[report,serve]"
	touch $@

# One installation, since each compiles the extensions anew.
$(VENV)/.installed-chat: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[report,hf,serve]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-site: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --editable ".[site]"
	touch $@

# --no-compile: most modules of the installed packages are never imported.
$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[test]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	touch $@ $(VENV)/.installed-test
