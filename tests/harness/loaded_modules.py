"""What a program loads of megatron_ds: modules and their syntax nodes, by room, and which import brings most of them.

    python -m tests.harness.loaded_modules pretrain_gpt.py --mock-data ...     runs it, then prints to stderr
    python -m tests.harness.loaded_modules --least 500 pretrain_gpt.py ...     lines of the tree with as many nodes

In the tree a module stands below the one without which nothing would load it, with the nodes of all that would go with
it. `~` marks imports that are made by functions.
"""

import argparse
import ast
import atexit
import builtins
import importlib
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "megatron_ds"
PROGRAM = "__main__"
CONTEXTS = (ast.Load, ast.Store, ast.Del)
# Importing module → imported modules → whether a function imports it.
Imports = dict[str, dict[str, bool]]


@cache
def nodes_of(path: Path) -> int:
    """Return the number of syntax nodes of a file, without those that tell a read from a write."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(not isinstance(node, CONTEXTS) for node in ast.walk(tree))


def loaded(modules: Mapping[str, ModuleType]) -> dict[str, int]:
    """Return the nodes of each module of the package among these, by name."""
    found = {}
    for name, module in modules.items():
        file = getattr(module, "__file__", None) or ""
        if f"{name}.".startswith(f"{PACKAGE}.") and file.endswith(".py"):
            found[name] = nodes_of(Path(file))
    return found


def record(imports: Imports) -> None:
    """Note from now on which module imports which."""
    plain = builtins.__import__
    by_name = importlib.import_module

    def note(importer: str, imported: str) -> None:
        in_function = sys._getframe(2).f_code.co_name != "<module>"
        known = imports[importer].get(imported, True)
        imports[importer][imported] = known and in_function

    def noted(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        module = plain(name, globals, locals, fromlist, level)
        importer = (globals or {}).get("__name__", "")
        above = (globals or {}).get("__package__") or ""
        full = resolve_name("." * level + name, above) if level else name
        for imported in (full, *(f"{full}.{part}" for part in fromlist or ())):
            if imported.startswith(PACKAGE) and imported in sys.modules:
                note(importer, imported)
        return module

    def noted_by_name(name: str, package: str | None = None) -> ModuleType:
        module = by_name(name, package)
        if module.__name__.startswith(PACKAGE):
            note(sys._getframe(1).f_globals["__name__"], module.__name__)
        return module

    builtins.__import__ = noted  # type: ignore[assignment]
    importlib.import_module = noted_by_name


def reached(imports: Imports, without: str | None = None) -> set[str]:
    """Return the modules that the program imports, directly or through others, if one of them were not there."""
    seen = {PROGRAM}
    waiting = [PROGRAM]
    while waiting:
        for name in imports.get(waiting.pop(), ()):
            if name not in seen and name != without:
                seen.add(name)
                waiting.append(name)
    return seen


def tree(imports: Imports) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return the modules that would go with each module, and the one that it stands below."""
    everything = reached(imports)
    gone = {
        name: everything - reached(imports, name) for name in everything - {PROGRAM}
    }
    below = {}
    for name in gone:
        holders = [other for other in gone if other != name and name in gone[other]]
        below[name] = min(holders, key=lambda o: len(gone[o]), default=PROGRAM)
    return gone, below


def rooms_text(nodes: Mapping[str, int]) -> Iterable[str]:
    """Yield the modules and nodes of each room, the largest first."""
    rooms = defaultdict(list)
    for name, count in nodes.items():
        rooms[name.split(".")[1] if "." in name else name].append(count)
    for room, counts in sorted(rooms.items(), key=lambda item: -sum(item[1])):
        yield f"{sum(counts):8,} nodes {len(counts):4} modules  {room}"


def tree_text(imports: Imports, nodes: Mapping[str, int], least: int) -> Iterable[str]:
    """Yield the lines of the tree with at least so many nodes."""
    gone, below = tree(imports)
    weight = {
        name: sum(nodes.get(n, 0) for n in with_it) for name, with_it in gone.items()
    }

    def lines(name: str, depth: int) -> Iterable[str]:
        inner = [other for other in below if below[other] == name]
        for other in sorted(inner, key=weight.__getitem__, reverse=True):
            if weight[other] < least:
                continue
            importers = [
                importer.removeprefix(f"{PACKAGE}.") + "~" * imported[other]
                for importer, imported in imports.items()
                if other in imported
            ]
            yield (
                f"{weight[other]:8,} {'  ' * depth}{other} <- {', '.join(importers[:4])}"
            )
            yield from lines(other, depth + 1)

    return lines(PROGRAM, 0)


def main() -> None:
    """Run the program of the command line, and print at its end what it has loaded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--least", type=int, default=1000)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    imports: Imports = defaultdict(dict)
    record(imports)

    def report() -> None:
        nodes = loaded(sys.modules)
        lines = [
            f"{sum(nodes.values()):8,} nodes {len(nodes):4} modules",
            *rooms_text(nodes),
        ]
        lines += ["", *tree_text(imports, nodes, args.least)]
        print("\n".join(lines), file=sys.stderr)

    atexit.register(report)
    sys.argv[:] = args.program
    runpy.run_path(sys.argv[0], run_name=PROGRAM)


if __name__ == "__main__":
    main()
