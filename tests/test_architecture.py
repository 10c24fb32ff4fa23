"""Architecture rules: imports go strictly downward, torch.distributed stays in three packages, importing is
light.

    10 __main__  launch  as_deepspeed           for python -m
    9  commands                   scripts and tools call them
    8  compat                     other programs' dialects: DeepSpeed, Megatron, Hugging Face, recipes
    7  extensions                 optimizers and features that hang on interfaces of the core
    6  training
    5  checkpoint  planning
    4  models
    3½ moe
    3  tensor_parallel  context_parallel  pipeline  zero             siblings never import one another
    2½ optim
    2  ops  data  batch
    1  config  mpu
    0  cli  console  errors  features  launch_env  registry  progress  version
       standard library only
       host    memory, files and disks of one machine: torch, and nothing above it
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from megatron_ds import features
from megatron_ds.config.run import all_options
from tests.harness.limits import HUNG
from tests.harness.syntax import tree_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_ds"
LAYERS = {
    "errors": 0,
    "registry": 0,
    "progress": 0,
    "version": 0,
    "features": 0,
    "cli": 0,
    "console": 0,
    "launch_env": 0,
    "host": 0,
    "config": 1,
    "mpu": 1,
    "batch": 1.5,
    "ops": 2,
    "data": 2,
    "optim": 2.5,
    "tensor_parallel": 3,
    "context_parallel": 3,
    "pipeline": 3,
    "zero": 3,
    "moe": 3.5,
    "models": 4,
    "checkpoint": 5,
    "planning": 5,
    "training": 6,
    "extensions": 7,
    "compat": 8,
    "commands": 9,
    "__main__": 10,
    "launch": 10,
    "as_deepspeed": 10,
}
ENTRY_POINTS = ("__main__", "launch", "as_deepspeed")  # for `python -m`
FILES_BELOW = (
    "mpu.grid",
)  # files that count as layer 0: arithmetic on the standard library
WITHOUT_TORCH = (
    "errors",
    "registry",
    "progress.ramps",
    "progress.cycles",
    "progress.kept_tokens",
    "progress.sequence_lengths",
    "extensions.data_efficiency.rules",
    "extensions.lora.rules",
    "extensions.onebit.rules",
    "extensions.sparse_layouts.sparse_rules",
    "version",
    "features",
    "cli",
    "console",
    "launch_env",
    "config",
    "mpu.grid",
    "pipeline.stage_bounds",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    """("zero", "layout") for megatron_ds/zero/layout.py; a package counts as its __init__."""
    return path.relative_to(PACKAGE).with_suffix("").parts


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = (
                    ("megatron_ds", *module_of(path))[: -node.level]
                    if path.is_relative_to(PACKAGE)
                    else ()
                )
                base = ".".join((*above, *filter(None, [node.module])))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def packages_imported(path: Path) -> list[tuple[int, str]]:
    return [
        (line, name.split(".")[1])
        for line, name in imports(path)
        if name.startswith("megatron_ds.")
        and name.split(".")[1] in LAYERS
        and not any(
            f"{name}.".startswith(f"megatron_ds.{file}.") for file in FILES_BELOW
        )
    ]


def test_every_package_has_its_layer():
    packages = {module_of(path)[0] for path in FILES} - {"__init__"}
    assert packages == set(LAYERS)


def upward(path: Path) -> list[str]:
    """Imports of a file that do not go down."""
    here = module_of(path)[0]
    below = packages_imported(path)
    if here == "__init__":
        return [f"line {line}: {name}" for line, name in below if name != "version"]
    return [
        f"line {line}: {here} (layer {LAYERS[here]}) imports {package} (layer {LAYERS[package]})"
        for line, package in below
        if package != here
        and LAYERS[package] >= LAYERS[here] > 0
        or LAYERS[here] == 0
        and package != here
        and LAYERS[package] > 0
    ]


def test_imports_go_strictly_downward():
    found = {str(path.relative_to(PACKAGE)): upward(path) for path in FILES}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def module_graph() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, anywhere in it and also for annotations alone."""
    names = {
        ".".join(("megatron_ds", *module_of(path))).removesuffix(".__init__"): path
        for path in FILES
    }
    graph = {}
    for name, path in names.items():
        found = {
            entry if entry in names else entry.rpartition(".")[0]
            for _, entry in imports(path)
        }
        graph[name] = (found & set(names)) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for following in graph[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reached = {name: reached_from(name) for name in graph}
    return [
        sorted(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    ]


def test_no_modules_import_each_other():
    """Circles hide which of two modules can be read without the other: move what both need to a third."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"], ["b", "c"]]
    assert not circles(module_graph())


def test_the_core_imports_no_wing():
    """What trains can be read, and used, without the wings (features.py). None needs another."""
    wings = ("megatron_ds.compat", "megatron_ds.extensions")
    free = ("megatron_ds.commands", "megatron_ds.__main__")
    for wing in wings:
        assert not {
            name: found
            for name, modules in module_graph().items()
            if not name.startswith((wing, *free))
            if (found := [m for m in modules if m.startswith(wing)])
        }


def test_every_test_file_has_the_marker_of_its_cost():
    """`pytest -m plan` and the like choose tests by it; rooms with a cost of their own need none."""
    free = {"contracts", "extension", "gpu", "kernels"}
    files = [
        path
        for path in (ROOT / "tests").glob("*/test_*.py")
        if path.parent.name not in free
    ]
    mark = re.compile(r"pytest\.mark\.(plan|threads|processes)\b")
    assert files and not [
        path.name for path in files if not mark.search(path.read_text(encoding="utf-8"))
    ]


def test_there_are_few_rooms():
    """Rooms at eye level, and floors: the longest chain of imports between them, without the entry point."""
    rooms = {}
    for name, modules in module_graph().items():
        room = name.split(".")[1] if "." in name else ""
        found = {module.split(".")[1] for module in modules if "." in module}
        rooms[room] = rooms.get(room, set()) | found - {room}
    for name in ("", *ENTRY_POINTS):
        del rooms[name]

    def floor(room: str) -> int:
        return 1 + max(map(floor, rooms[room]), default=0)

    assert len(rooms) <= 27
    assert max(map(floor, rooms)) <= 12


def test_nothing_in_the_package_imports_what_stands_above_it():
    above = {"tools", "tests", "benchmarks", "pretrain_gpt", "pretrain_bert"}
    assert not {
        str(path): names
        for path in FILES
        if (names := {name.split(".")[0] for _, name in imports(path)} & above)
    }


def lines_with_torch_distributed(path: Path) -> list[int]:
    spelled = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    return spelled + [
        line for line, name in imports(path) if name.startswith("torch.distributed")
    ]


# Writes a folder in the format of torch.distributed.checkpoint, by one process and without its collectives.
DCP_WRITER = ("compat", "conversion", "megatron", "dcp_folder")


def test_torch_distributed_is_spelled_only_in_mpu_checkpoint_and_deepspeeds_names():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in FILES
        if module_of(path)[0] not in ("mpu", "checkpoint")
        and module_of(path)[:2] != ("compat", "deepspeed")
        and module_of(path) != DCP_WRITER
        if (lines := lines_with_torch_distributed(path))
    }
    assert not found


def modules_after(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after the statement, without those it begins
    with."""
    code = (
        f"import sys; before = set(sys.modules); {statement}; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=HUNG,
    )
    return set(done.stdout.split())


def test_what_plans_without_torch_imports_the_standard_library_alone():
    for module in WITHOUT_TORCH:
        foreign = (
            modules_after(f"import megatron_ds.{module}")
            - sys.stdlib_module_names
            - {"megatron_ds"}
        )
        assert not {name for name in foreign if not name.startswith("_")}, module


def test_importing_the_package_imports_two_files_of_its_own_and_nothing_else():
    code = (
        "import torch, numpy, sys; before = set(sys.modules); import megatron_ds; "
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=HUNG,
    )
    assert set(done.stdout.split()) == {"megatron_ds", "megatron_ds.version"}


def test_every_package_needs_torch_and_numpy_only_and_starts_nothing():
    """Tokenizers, TensorBoard, YAML and their like are imported when they are used."""
    packages = [package for package in LAYERS if (PACKAGE / package).is_dir()]
    statement = "; ".join(
        [
            "import torch, numpy",
            "before = set(sys.modules)",
            *(f"import megatron_ds.{r}" for r in packages),
            "import megatron_ds.training.pretrain",
            "import torch.distributed as dist",
            "assert not dist.is_initialized()",
        ]
    )
    optional = {
        "regex",
        "tokenizers",
        "sentencepiece",
        "safetensors",
        "tensorboard",
        "yaml",
        "tqdm",
        "matplotlib",
        "pyarrow",
        "zstandard",
        "nltk",
        "h5py",
        "ray",
    }
    assert not modules_after(statement) & optional


CACHES_WITH_TENSORS = {
    # A plan and a run have objects of their own as keys.
    "batch.documents._foreign",
    "batch.documents._bias",
    "extensions.kernels.gpu.flex_attention._of_batch",
    # Weights are encoded and decoded in runs alone.
    "ops.normal_float._borders",
    "ops.normal_float._pairs",
    # Keyed by the device, which is "meta" in plans for GPUs.
    "extensions.kernels.gpu.flex_attention._of_pattern",
    "extensions.kernels.gpu.flex_attention._pattern_tiles",
    "extensions.kernels.gpu.flex_attention._pattern_mods",
}
MAY_HOLD_TENSORS = (
    "Tensor",
    "VisibleBlocks",
    "MaskMod",
    "BlockMask",
    "Batch",
    "Routing",
)


def cached_functions(path: Path) -> list[ast.FunctionDef]:
    """Functions whose results functools keeps for the whole process."""
    return [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        and any(
            ast.unparse(d).partition("(")[0].rpartition(".")[2]
            in ("cache", "lru_cache")
            for d in node.decorator_list
        )
    ]


def test_no_cache_keeps_a_tensor_that_a_plan_could_have_made():
    """Plans run in the process of a run (--zero3-pin-stage auto), in tensors without memory. A cache that a
    plan fills would give one of them to the run. Keep numbers or numpy arrays, and make the tensor where it
    is used."""
    found = set()
    for path in FILES:
        for node in cached_functions(path):
            returns = ast.unparse(node.returns) if node.returns else "Any"
            if returns == "Any" or any(word in returns for word in MAY_HOLD_TENSORS):
                found.add(".".join((*module_of(path), node.name)))
    assert found == CACHES_WITH_TENSORS


def test_the_entry_scripts_stay_short():
    for script in ("pretrain_gpt.py", "pretrain_bert.py"):
        assert len((ROOT / script).read_text().splitlines()) <= 60


def test_what_a_wing_provides_is_asked_for():
    """A name in `provides` that no module asks for is a part that no run uses."""
    asked = {
        node.value
        for path in FILES
        if path.name != "feature.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    provided = [name for one in features.features() for name in one.provides]
    assert len(provided) > 20
    assert sorted(provided) == sorted(set(provided))
    assert [name for name in provided if name not in asked] == []


# Words of features of the wings; the core knows the interface of a feature, never its name.
WORDS_OF_WINGS = re.compile(
    r"lora|adapter|distil|teacher|preference|\bdpo\b|dpo_|wandb|comet|mlflow|otel|opentelemetry|curricul|"
    r"random.?ltd|(?<!moe.)token.?drop|one_?bit|zero_one|sparse.?(?:attention|layouts)|upcycl|bert",
    re.IGNORECASE,
)
# (file, word) -> why the core has it. Entries may only go.
WORDS_THAT_STAY = {
    ("data/samples/gpt_corpus.py", "dpo"): "advice of an error names the flag",
    ("training/run_checkpoint.py", "upcycl"): "advice of an error names the command",
}


def words_of_wings(pattern, files):
    """Yield (file, line, word) of the words in the names and in the lines of files."""
    for path in files:
        name = str(path.relative_to(PACKAGE))
        for number, line in enumerate([name, *path.read_text().split("\n")]):
            for word in pattern.findall(line):
                yield name, number, word.lower().removeprefix("--")


def test_the_core_has_no_words_of_the_wings():
    """Identifiers, texts, comments and names of files; and every flag of a section of theirs."""
    wings = (*features.WINGS, "commands")
    core = [path for path in FILES if module_of(path)[0] not in wings]
    own = {feature.name for feature in features.features() if feature.options}
    flags = [option.flag for option in all_options().values() if option.section in own]
    assert len(core) > 200 and len(flags) > 50
    of_options = re.compile(rf"(?<![\w-])(?:{'|'.join(flags)})(?![\w-])")
    found = {*words_of_wings(WORDS_OF_WINGS, core), *words_of_wings(of_options, core)}
    offenders = [
        f"{file}:{line} {word}"
        for file, line, word in sorted(found)
        if (file, word) not in WORDS_THAT_STAY
    ]
    assert offenders == []
    assert {(file, word) for file, _, word in found} == set(WORDS_THAT_STAY)


def test_the_core_names_no_file_of_a_wing():
    """Features are found by looking into the folders of the wings; one table of names would grow with each."""
    wings = {path.parent.name for path in FILES if path.name == "feature.py"}
    named = [
        f"{path.relative_to(ROOT)}: {node.value}"
        for path in FILES
        if module_of(path)[0] not in (*features.WINGS, "commands", "__init__")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"\.?(compat|extensions)(\.\w+)+(:\w+)?", node.value)
    ]
    assert len(wings) > 10
    assert named == []
