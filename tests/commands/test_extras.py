"""Extras: a missing package is named in one spelling, with an extra that installs it."""

import ast
import re
import sys
import tomllib

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.launch.env_report import EXTRAS
from megatron_ds.host.packages import extra_command, import_extra, missing_package
from tests.harness.documents import ROOT, pages
from tests.harness.syntax import tree_of

pytestmark = pytest.mark.plan

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = re.compile(r"megatron_ds\[([\w,]+)\]$")
# Modules whose distribution has another name.
DISTRIBUTION = {
    "upath": "universal_pathlib",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-exporter-otlp-proto-http",
}
CALLS = {"import_extra": (1, 2), "missing_package": (1, 2), "check_package": (1, 2)}


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].lower()


def packages_of(extra: str) -> set[str]:
    """The distributions that an extra installs, also through extras that it names."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if own := OWN.match(requirement):
            found |= set().union(*map(packages_of, own[1].split(",")))
        else:
            found.add(name_of(requirement))
    return found


def named_in_sources() -> list[tuple[str, str, str]]:
    """(place, module, extra) of every call that names a package in letters."""
    found = []
    for path in sorted((ROOT / "megatron_ds").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            words = list(node.args)
            function = getattr(node.func, "id", "")
            # partial(check_package, flag, module, extra)
            if function == "partial":
                function = getattr(words.pop(0), "id", "")
            if function not in CALLS or len(words) < 3:
                continue
            named = [words[i] for i in CALLS[function]]
            if all(isinstance(each, ast.Constant) for each in named):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append((place, *(each.value for each in named)))
    return found


def test_each_package_that_a_message_names_is_in_its_extra():
    named = named_in_sources()
    assert len(named) >= 16
    for place, module, extra in named:
        for name in module.split(" and "):
            top = name.partition(".")[0]
            assert DISTRIBUTION.get(top, top) in packages_of(extra), place


def test_each_package_that_env_lists_is_in_its_extra():
    for module, (_, source) in EXTRAS.items():
        if own := OWN.match(source):
            assert DISTRIBUTION.get(module, module) in packages_of(own[1]), module


def test_the_extra_all_is_every_extra_but_those_for_development():
    extras = set(PROJECT["optional-dependencies"])
    (own,) = PROJECT["optional-dependencies"]["all"]
    named = set(OWN.match(own)[1].split(","))
    aliases = {"chat", "verify"}
    assert named == extras - aliases - {"all", "test", "dev", "site"}
    assert all(packages_of(alias) == packages_of("hf") for alias in aliases)


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught:
        import_extra("drawing", "matplotlib", "report", "Or write a table.")
    text = str(caught.value)
    assert text.startswith("drawing needs the package matplotlib (")
    assert text.endswith(
        'Install it with: python -m pip install "megatron_ds[report]". Or write a table.'
    )
    assert import_extra("this", "json", "report").loads("1") == 1
    assert extra_command("hf") in str(missing_package("x", "transformers", "hf", "?"))


def test_pages_spell_installations_as_the_messages_do():
    """The command alone, `pip install`, is the name of an action."""
    files = [ROOT / page for page in pages() if page != "CHANGELOG.md"]
    files += [*(ROOT / "megatron_ds").rglob("*.py"), *(ROOT / "examples").rglob("*.sh")]
    lines = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if "pip install " in line.replace("`pip install` ", "")
    ]
    assert len(lines) > 10
    spelt = re.compile(r"python -m pip install (-e )?(\"[^\"']+\"|[^\"'\[ ]+)")
    for line in lines:
        assert len(re.findall("pip install", line)) == len(spelt.findall(line)), line


def test_what_the_quickstart_runs_is_installed_at_once():
    """Its last step draws the loss."""
    makefile = (ROOT / "Makefile").read_text()
    (extras,) = re.findall(
        r"^\$\(VENV\)/\.installed: .*\n.*\"\.\[([\w,]+)\]\"", makefile, re.MULTILINE
    )
    installed = set().union(*map(packages_of, extras.split(",")))
    assert {"matplotlib", "tensorboard"} <= installed
