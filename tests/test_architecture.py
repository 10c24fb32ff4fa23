"""The house keeps its order: imports go strictly downward, torch.distributed stays in three rooms, importing is light.

    8  scripts, tools, utils
    7  engine
    6  training
    5  checkpoint
    4  models
    3  tensor_parallel  pipeline  zero  optim        siblings never import one another
    2  ops  data  comm
    1  config  mpu  accelerator  checkpointing
    0  compiled  errors  registry  progress  ramps  difficulty  token_drop  version    standard library only
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_ds"
LAYERS = {
    "compiled": 0, "errors": 0, "registry": 0, "progress": 0, "ramps": 0, "difficulty": 0, "token_drop": 0, "version": 0,
    "config": 1, "mpu": 1, "ops": 2, "data": 2, "tensor_parallel": 3, "pipeline": 3, "zero": 3, "optim": 3, "models": 4,
    "checkpoint": 5, "training": 6, "engine": 7, "accelerator": 1, "comm": 2, "checkpointing": 1, "utils": 8}
WITHOUT_TORCH = ("compiled", "errors", "registry", "progress", "ramps", "difficulty", "token_drop", "version", "config",
                 "mpu.grid", "pipeline.partition")
MOST_LINES = 400
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    """("zero", "layout") for megatron_ds/zero/layout.py; a package counts as its __init__."""
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ("megatron_ds", *module_of(path))[:-node.level] if path.is_relative_to(PACKAGE) else ()
                base = ".".join((*above, *filter(None, [node.module])))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def rooms_imported(path: Path) -> list[tuple[int, str]]:
    return [(line, name.split(".")[1]) for line, name in imports(path)
            if name.startswith("megatron_ds.") and name.split(".")[1] in LAYERS]


def test_every_room_has_its_layer():
    rooms = {module_of(path)[0] for path in FILES} - {"__init__"}
    assert rooms == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_strictly_downward(path):
    here = module_of(path)[0]
    if here == "__init__":
        assert not [name for _, name in rooms_imported(path) if name != "version"]
        return
    wrong = [f"line {line}: {here} (layer {LAYERS[here]}) imports {room} (layer {LAYERS[room]})"
             for line, room in rooms_imported(path) if room != here and LAYERS[room] >= LAYERS[here] > 0 or
             LAYERS[here] == 0 and room != here and LAYERS[room] > 0]
    assert not wrong, "\n".join(wrong)


def test_nothing_in_the_package_imports_what_stands_above_it():
    above = {"tools", "tests", "benchmarks", "pretrain_gpt", "pretrain_bert"}
    assert not {str(path): names for path in FILES if (names := {name.split(".")[0] for _, name in imports(path)} & above)}


@pytest.mark.parametrize("path", [p for p in FILES if module_of(p)[0] not in ("mpu", "checkpoint", "comm")],
                         ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_distributed_is_spelled_only_in_mpu_checkpoint_and_comm(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    spelled = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
        "torch.distributed")]
    assert not spelled + [line for line, name in imports(path) if name.startswith("torch.distributed")]


def modules_after(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after the statement, without those it begins with."""
    code = (f"import sys; before = set(sys.modules); {statement}; "
            "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_plans_without_torch_imports_the_standard_library_alone(module):
    foreign = modules_after(f"import megatron_ds.{module}") - sys.stdlib_module_names - {"megatron_ds"}
    assert not {name for name in foreign if not name.startswith("_")}


def test_importing_the_package_adds_less_than_a_third_of_a_second_and_no_module_to_torch():
    code = ("import time, torch, numpy, sys; before = set(sys.modules); start = time.perf_counter(); import megatron_ds; "
            "print(time.perf_counter() - start, *(set(sys.modules) - before))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=120)
    seconds, *modules = done.stdout.split()
    assert float(seconds) < 0.3
    assert {name.split(".")[0] for name in modules} == {"megatron_ds"}


def test_every_room_needs_torch_and_numpy_only_and_starts_nothing():
    """Tokenizers, TensorBoard, YAML and their like are imported when they are used."""
    rooms = [room for room in LAYERS if (PACKAGE / room).is_dir()]
    statement = "; ".join(["import torch, numpy", "before = set(sys.modules)", *(f"import megatron_ds.{r}" for r in rooms),
                           "import megatron_ds.training.pretrain", "import torch.distributed as dist",
                           "assert not dist.is_initialized()"])
    optional = {"regex", "tokenizers", "sentencepiece", "safetensors", "tensorboard", "yaml", "tqdm", "matplotlib", "pyarrow",
                "zstandard", "nltk", "h5py", "ray"}
    assert not modules_after(statement) & optional


def test_no_file_outgrows_its_noun():
    """400 lines are a hint to look for the seam."""
    files = [*FILES, *(ROOT / "tools").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files
            if (n := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES}
    assert not long


def test_the_entry_scripts_stay_short():
    for script in ("pretrain_gpt.py", "pretrain_bert.py"):
        assert len((ROOT / script).read_text().splitlines()) <= 60
