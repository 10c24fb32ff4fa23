"""jemalloc and mimalloc as this process's allocator: stand-ins with their interface, and the libraries where
they are installed. Another allocator keeps its own settings, and a refused call is reported.
"""

import errno
import os
import subprocess
import sys
from ctypes.util import find_library
from types import SimpleNamespace

import pytest

from benchmarks import allocators
from megatron_ds.host import allocator

pytestmark = pytest.mark.plan

DEFAULTS = {
    f"{arena}.{name}": value
    for arena in ("arenas", "arena.0", "arena.2")
    for name, value in (("dirty_decay_ms", 10000), ("muzzy_decay_ms", 1000))
}
OPTIONS = ("verbose", "deprecated_delay", "purge_delay", "os_tag")


def function(body):
    """ctypes gives functions attributes, which methods cannot have."""
    return lambda *arguments: body(*arguments)


class StandIn(SimpleNamespace):
    """The symbols of a process. The allocator has those of glibc, too, as a preloaded one has."""

    def __init__(self, **symbols):
        self.given = []
        super().__init__(
            malloc=function(None),
            gnu_get_libc_version=function(lambda: b"2.99"),
            mallopt=function(
                lambda option, value: self.given.append((option, value)) or 1
            ),
            **symbols,
        )


class Jemalloc(StandIn):
    """Arenas 0 and 2 of three exist. refused: a key with the errno of its change; None changes nothing."""

    def __init__(self, refused=("", 0)):
        super().__init__(mallctl=function(self.control))
        self.settings, self.refused = dict(DEFAULTS), refused

    def control(self, key, old, size, new, new_size):
        key = key.decode()
        known = self.settings | {
            "version": b"5.9.1-0-gabc",
            "arenas.narenas": 3,
            "arena.0.initialized": True,
            "arena.1.initialized": False,
            "arena.2.initialized": True,
        }
        if key not in known:
            return errno.EFAULT if key.startswith("arena.1") else errno.ENOENT
        if new is not None:
            assert new_size == 8
            if key == self.refused[0]:
                return self.refused[1] or 0
            self.settings[key] = new._obj.value
        if old is not None:
            old._obj.value = known[key]
        return 0


class Mimalloc(StandIn):
    def __init__(self, names=OPTIONS, accepts=True):
        super().__init__(
            mi_version=function(lambda: 30207),
            mi_option_set=function(self.set),
            mi_options_print_out=function(self.print),
        )
        self.names, self.accepts, self.values = names, accepts, [7] * len(names)

    def set(self, number, value):
        if self.accepts:
            self.values[number] = value

    def print(self, write, argument):
        write(b"v3.2.7, release\n", argument)
        for name, value in zip(self.names, self.values):
            write(
                b"option '%s': " % name.encode(), argument
            )  # a line may come in parts
            write(b"%d KiB\n" % value, argument)


@pytest.fixture(autouse=True)
def one_library(monkeypatch):
    """All functions of a stand-in are those of one library; the environment is empty."""
    monkeypatch.setattr(
        allocator, "library_of", lambda function: "/lib/liballocator.so.1"
    )
    monkeypatch.setattr(os, "environ", {})


WAYS = pytest.mark.parametrize(
    "keep_freed, when, what", [(True, -1, "kept"), (False, 0, "returned")]
)


@WAYS
def test_jemalloc_keeps_or_returns_freed_memory_in_all_arenas_and_new_ones(
    keep_freed, when, what
):
    process = Jemalloc()
    setting = allocator.configure(process, keep_freed)
    assert process.settings == dict.fromkeys(DEFAULTS, when) and process.given == []
    assert (
        str(setting) == f"allocator: jemalloc 5.9.1, freed memory is {what}"
        and setting.is_ours
    )
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == (None if keep_freed else "1")


@pytest.mark.parametrize(
    "refused, reason",
    [
        (
            ("arena.2.dirty_decay_ms", errno.EFAULT),
            "arena.2.dirty_decay_ms (Bad address)",
        ),
        (("arenas.muzzy_decay_ms", None), "arenas.muzzy_decay_ms (unchanged)"),
    ],
)
def test_a_refused_change_of_jemalloc_is_reported(refused, reason):
    setting = allocator.configure(Jemalloc(refused), True)
    assert (
        not setting.is_ours
        and str(setting) == f"allocator: jemalloc 5.9.1, which refused {reason}"
    )


@WAYS
def test_mimalloc_keeps_or_returns_freed_memory_by_the_option_with_the_name(
    keep_freed, when, what
):
    process = Mimalloc()
    setting = allocator.configure(process, keep_freed)
    assert process.values == [7, 7, when, 7] and process.given == []
    assert (
        str(setting) == f"allocator: mimalloc 3.2.7, freed memory is {what}"
        and setting.is_ours
    )
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == (None if keep_freed else "1")


@pytest.mark.parametrize(
    "process, reason",
    [
        (Mimalloc(accepts=False), "which refused purge_delay = -1"),
        (
            Mimalloc(names=("verbose", "reset_delay")),
            "with its own settings: purge_delay is not among them",
        ),
        (
            StandIn(mi_version=function(lambda: 209), mi_option_set=function(None)),
            "with its own settings: this version does not list them",
        ),
    ],
)
def test_a_mimalloc_without_the_option_keeps_its_own_settings(process, reason):
    setting = allocator.configure(process, True)
    version = "2.0.9" if "this version" in reason else "3.2.7"
    assert (
        not setting.is_ours
        and str(setting) == f"allocator: mimalloc {version}, {reason}"
    )


@pytest.mark.parametrize(
    "process, variable, value",
    [
        (Jemalloc(), "MALLOC_CONF", "narenas:2,dirty_decay_ms:5"),
        (Mimalloc(), "MIMALLOC_PURGE_DELAY", "5"),
    ],
)
def test_the_users_settings_of_a_preloaded_allocator_stay(process, variable, value):
    os.environ[variable] = value
    setting = allocator.configure(process, False)
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
    assert getattr(process, "settings", DEFAULTS) == DEFAULTS
    assert getattr(process, "values", [7] * 4) == [7] * 4
    assert setting.effect == f"as {variable} sets it" and not setting.is_ours


@pytest.mark.parametrize(
    "keep_freed, effect, settings",
    [
        (True, "freed memory is kept", allocator.ONE_ARENA + allocator.KEEP_FREED),
        (
            False,
            "freed blocks of 1 MiB and more are returned",
            allocator.ONE_ARENA + allocator.RETURN_FREED,
        ),
    ],
)
def test_glibc_is_configured_where_nothing_is_preloaded(keep_freed, effect, settings):
    process = StandIn()
    setting = allocator.configure(process, keep_freed)
    assert str(setting) == f"allocator: glibc 2.99, {effect}" and setting.is_ours
    assert tuple(process.given) == settings
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == (None if keep_freed else "1")


def test_a_refused_setting_of_glibc_is_reported():
    process = StandIn()
    process.mallopt = function(lambda option, value: int(option != allocator.M_TOP_PAD))
    setting = allocator.configure(process, True)
    assert (
        not setting.is_ours and setting.effect == "which refused mallopt -2 = 67108864"
    )


def test_an_allocator_that_serves_other_functions_than_malloc_is_left_alone(
    monkeypatch,
):
    process = Jemalloc()
    monkeypatch.setattr(
        allocator,
        "library_of",
        lambda function: (
            f"/lib/lib{'tc' if function is process.malloc else 'x'}malloc.so.4"
        ),
    )
    setting = allocator.configure(process, True)
    assert (
        str(setting) == "allocator: libtcmalloc.so.4, with its own settings"
        and not setting.is_ours
    )
    assert process.settings == DEFAULTS and process.given == []


def test_a_run_remembers_its_setting_for_the_text_at_its_start(monkeypatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Jemalloc())
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator, "_SETTINGS", [])
    assert allocator.allocator_text() == ""
    allocator.set_allocator(keep_freed=True)
    assert (
        allocator.allocator_text() == "allocator: jemalloc 5.9.1, freed memory is kept"
    )


def test_a_benchmark_preloads_the_allocator_everywhere_and_gives_peers_our_settings(
    monkeypatch, tmp_path
):
    (tmp_path / "libjemalloc.so.2").touch()
    monkeypatch.setattr(allocators, "FOLDERS", (tmp_path,))
    os.environ["LD_PRELOAD"] = "/lib/other.so"
    preloaded = {"LD_PRELOAD": f"{tmp_path}/libjemalloc.so.2:/lib/other.so"}
    assert allocators.environment("jemalloc", is_ours=True) == preloaded
    assert allocators.environment("jemalloc", is_ours=False) == preloaded | {
        "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"
    }
    assert (
        allocators.environment("keep", is_ours=True)
        == allocators.environment("default", False)
        == {}
    )
    assert allocators.environment("keep", is_ours=False)["MALLOC_MMAP_MAX_"] == "0"


def test_a_benchmark_without_the_library_names_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(allocators, "FOLDERS", ())
    monkeypatch.setattr(allocators, "find_library", lambda name: None)
    with pytest.raises(
        SystemExit,
        match="no libjemalloc.so is installed.* `apt-get install libjemalloc2`",
    ):
        allocators.environment("jemalloc", is_ours=True)


# Its own calls, so that a mistake in those of the package is found.
PROBE = """
import ctypes, sys, threading
from megatron_ds.host.allocator import set_allocator
if sys.argv[1] != "none":
    print(set_allocator(keep_freed=sys.argv[1] == "keep"))
process = ctypes.CDLL(None)

def decay(key):
    value, size = ctypes.c_ssize_t(), ctypes.c_size_t(8)
    failed = process.mallctl(key, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value

if hasattr(process, "mallctl"):
    threads = [threading.Thread(target=lambda: bytearray(9 << 20)) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    keys = [b"arenas.%s_decay_ms", *(b"arena.%d.%%s_decay_ms" % number for number in range(16))]
    found = [decay(key % page) for key in keys for page in (b"dirty", b"muzzy")]
    print(*sorted({value for value in found if value is not None}))
else:
    process.mi_option_get.restype = ctypes.c_long
    print(process.mi_option_get(15))        # mi_option_purge_delay of 2.1 to 3.4
"""


def printed_with(library, asked):
    found = subprocess.run(
        [sys.executable, "-c", PROBE, asked],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": os.defpath,
            "LD_PRELOAD": library,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    assert found.stderr == ""
    return found.stdout.splitlines()


@pytest.mark.skipif(
    find_library("jemalloc") is None, reason="libjemalloc is not installed"
)
@pytest.mark.parametrize(
    "asked, when, what", [("keep", "-1", "kept"), ("return", "0", "returned")]
)
def test_a_preloaded_jemalloc_has_the_settings(asked, when, what):
    said, values = printed_with(find_library("jemalloc"), asked)
    assert said.startswith("allocator: jemalloc 5.") and said.endswith(
        f", freed memory is {what}"
    )
    assert values == when
    assert "10000" in printed_with(find_library("jemalloc"), "none")[0].split()


MIMALLOC = [
    str(file) for file in {allocators.FOLDERS[0] / "libmimalloc.so"} if file.exists()
]


@pytest.mark.skipif(
    not MIMALLOC and find_library("mimalloc") is None,
    reason="libmimalloc is not installed",
)
@pytest.mark.parametrize(
    "asked, when, what", [("keep", "-1", "kept"), ("return", "0", "returned")]
)
def test_a_preloaded_mimalloc_has_the_settings_or_keeps_its_own(asked, when, what):
    for library in filter(None, (*MIMALLOC, find_library("mimalloc"))):
        said, value = printed_with(library, asked)
        (unset,) = printed_with(library, "none")
        is_ours = said.endswith(f", freed memory is {what}")
        assert said.startswith("allocator: mimalloc ") and (
            is_ours or ", with its own settings" in said
        )
        assert (value == when != unset) if is_ours else value == unset
