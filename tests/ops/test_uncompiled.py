"""Without a compiler a process warns once of all C++ modules; where one is missing, of that one."""

import importlib
import importlib.util
import logging
import re
from pathlib import Path

import pytest

from megatron_ds import host
from megatron_ds.host import COMPILED, load_compiled

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
LOGGER = logging.getLogger("megatron_ds.test")


@pytest.fixture
def absent(monkeypatch):
    """A set of module names that cannot be imported."""
    names, load, find = set(), importlib.import_module, importlib.util.find_spec
    own = lambda name: name.removeprefix("megatron_ds.")

    def imported(name, *rest):
        if own(name) in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *rest)

    monkeypatch.setattr(importlib, "import_module", imported)
    found = lambda name: None if own(name) in names else find(name) or object()
    monkeypatch.setattr(host, "find_spec", found)
    host._warn_of_all.cache_clear()
    yield names
    host._warn_of_all.cache_clear()


def test_without_any_module_there_is_one_warning(absent, caplog):
    absent.update(COMPILED)
    assert [
        load_compiled(name, what, "torch's runs", LOGGER)
        for name, what in COMPILED.items()
    ] == [None] * len(COMPILED)
    [line] = caplog.messages
    assert (
        "no C++ module" in line
        and all(what in line for what in COMPILED.values())
        and "C++17" in line
    )


def test_one_missing_module_is_named(absent, caplog):
    absent.add("_gelu")
    assert load_compiled("_gelu", "GELU", "torch's runs instead", LOGGER) is None
    assert caplog.messages == [
        "GELU is not compiled (No module named 'megatron_ds._gelu'): torch's runs instead. Reinstall "
        "megatron_ds with a C++17 compiler to have it."
    ]


def test_the_table_has_the_modules_of_the_build():
    text = (ROOT / "setup.py").read_text()
    built = {f"_{name}" for name in re.findall(r'extension\("\w+/(\w+)"', text)}
    assert built >= set(COMPILED)
