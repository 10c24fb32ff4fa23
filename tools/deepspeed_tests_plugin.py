"""The plugin of pytest that tools/run_deepspeed_tests.py uses, and the module `deepspeed` of its tests.

As a plugin it chooses tests, and writes a line for each outcome into the file DEEPSPEED_TESTS_OUT:

    outcome    seconds    name of the test    last line of its error

`make_alias` makes this package importable as `deepspeed`, with what DeepSpeed's tests ask of an installation.
A name that the package lacks is a class there whose use raises NotImplementedError.
"""

import collections
import importlib.machinery
import os
import random
import sys
import types
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("DEEPSPEED_TESTS_OUT", os.devnull))
BUILDERS = "deepspeed.ops.op_builder"
VERSION = "deepspeed.git_version_info"
LONGEST = 400  # characters of a line of an error


# ---------------------------------------------------------------------------------------------------- the alias
class Missing(type):
    """The class of names that the package lacks."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"MISSING {cls.place}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"MISSING {cls.place}.{name}")


def missing(module: str, name: str) -> type:
    """A class in place of a name that the package lacks."""
    return Missing(name, (), {"place": f"{module}.{name}"})


class Stub(types.ModuleType):
    """A module that the package lacks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(self.__name__, name)


class Builders(types.ModuleType):
    """Builders of kernels: each says that its kernel is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"NAME": name, "is_compatible": lambda *_, **__: True})


class Stubs:
    """Finds the modules below `deepspeed` that no other finder knows."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a module below `deepspeed`; None for others."""
        if not name.startswith("deepspeed."):
            return None
        return importlib.machinery.ModuleSpec(name, Stubs, is_package=True)

    @staticmethod
    def create_module(spec: Any) -> types.ModuleType:
        """A module whose names are placeholders."""
        module = Stub(spec.name)
        if spec.name == VERSION:
            module.torch_info = _torch_info()
        return module

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Names are made when they are used."""


def _torch_info() -> dict[str, Any]:
    """Versions that tests compare before they run."""
    import torch

    return {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "cuda_version": "0.0",
        "hip_version": "0.0",
        "bf16_support": True,
    }


def make_alias() -> None:
    """Make `import deepspeed` import this package."""
    import megatron_ds
    from megatron_ds.compat.deepspeed import modules

    megatron_ds.install_as_deepspeed()
    sys.meta_path.append(Stubs)
    find = modules.find

    def find_or_missing(module: str, name: str) -> Any:
        """The name, or a class that raises an error when it is used."""
        try:
            return find(module, name)
        except AttributeError:
            is_package = module == "megatron_ds" and name[:1].islower()
            if name.startswith("__") or is_package:
                raise
            return missing(module, name)

    modules.find = find_or_missing
    # Tests ask for as many devices as they start processes, which share the CPU.
    accelerator = type(megatron_ds.accelerator.get_accelerator())
    accelerator.device_count = lambda self: int(os.environ.get("LOCAL_SIZE", "1"))
    # They skip what needs kernels that are not there.
    sys.modules[BUILDERS] = Builders(BUILDERS)
    megatron_ds.ops.__compatible_ops__ = collections.defaultdict(lambda: True)


# ---------------------------------------------------------------------------------------------------- the plugin
def _rows(path: Path) -> list[list[str]]:
    """The fields of each line of an outcome file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line.split("\t") for line in lines]


def _written() -> list[list[str]]:
    """The outcomes so far."""
    return _rows(OUT)


def pytest_configure(config: Any) -> None:
    """Processes of tests are copies of one that has imported these."""
    import torch.multiprocessing

    preload = os.environ["DEEPSPEED_TESTS_PRELOAD"].split()
    torch.multiprocessing.set_forkserver_preload(preload)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that are asked for and have no outcome yet."""
    done = {row[2] for row in _written()}
    names = _sample([item.nodeid for item in items])
    if only := os.environ["DEEPSPEED_TESTS_ONLY"]:
        names = [row[2] for row in _rows(Path(only)) if row[0] == "passed"]
    items[:] = [item for item in items if item.nodeid in set(names) - done]


def _sample(names: list[str]) -> list[str]:
    """At most so many tests of each file as are asked for."""
    most = int(os.environ["DEEPSPEED_TESTS_SAMPLE"])
    files = collections.defaultdict(list)
    for name in sorted(names):
        files[name.split("::")[0]].append(name)
    if not most:
        return names
    chosen = []
    for file, all_of_it in files.items():
        drawn = random.Random(f"7{file}")
        chosen += drawn.sample(all_of_it, min(most, len(all_of_it)))
    return chosen


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Write which test is under way: one that hangs ends the process."""
    Path(f"{OUT}.now").write_text(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Write the first outcome of a test that is not the end of its set-up."""
    is_last = report.when == "call" or report.outcome != "passed"
    if not is_last or report.nodeid in {row[2] for row in _written()}:
        return
    _write(report.outcome, report.duration, report.nodeid, _line(report.longrepr))
    if report.failed:
        with Path(f"{OUT}.log").open("a") as log:
            log.write(f"==== {report.nodeid}\n{report.longrepr}\n")


def pytest_collectreport(report: Any) -> None:
    """Write a file that cannot be imported."""
    if report.failed:
        _write("error", 0.0, report.nodeid, _line(report.longrepr)[-LONGEST:])


def _line(error: Any) -> str:
    """An error of pytest on one line."""
    crash = getattr(error, "reprcrash", None)
    reason = error[2] if isinstance(error, tuple) else error or ""
    text = reason if crash is None else crash.message
    return " ".join(str(text).split())


def _write(outcome: str, seconds: float, name: str, line: str) -> None:
    """Add an outcome to the file."""
    fields = [outcome, f"{seconds:.1f}", name, line[:LONGEST]]
    with OUT.open("a") as out:
        out.write("\t".join(fields) + "\n")
