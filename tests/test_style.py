"""Style rules that can be counted: annotations, docstrings, signatures, file sizes and names, words.

What counts:

* A name is *public* if neither it nor a module or class around it begins with an underscore. Nested functions
are not public.
* Annotations: all parameters of public functions, public methods and constructors of public classes, also
*args and **kwargs,
  without self and cls.
* Docstrings: public modules, classes, functions, methods and properties. Not dunder methods. A method also
has the docstring of
  the method that it overrides in a base class of this package, as `inspect.getdoc` finds it.
* Signatures: parameters of every function, public or not, without self and cls. Fields of dataclasses are not
parameters.
* `forward`, `backward` and their like of autograd Functions count nowhere: torch calls them by position.
* Words: in docstrings, comments, other strings, and names of functions and classes.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.harness.syntax import tree_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_ds"
FILES = sorted(PACKAGE.rglob("*.py"))

# "" is the modules beside the rooms.
ROOMS = ("", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))

ANNOTATED, DOCUMENTED = 0.98, 0.95
MOST_PARAMETERS = 8
MOST_NODES = 2700  # of a file of the package
MOST_NODES_OF_TESTS = 3000
AUTOGRAD = {"forward", "backward", "setup_context", "jvp", "vmap"}
# Functions under DeepSpeed's names have DeepSpeed's parameters.
SIGNATURES_OF_DEEPSPEED = {
    "compat.deepspeed.comm.init_distributed",
    "compat.deepspeed.checkpointing.configure",
    "compat.engine.initialization.initialize",
    "compat.engine.pipeline_module.PipelineModule.__init__",
    "compat.engine.module_profiler.get_model_profile",
    "compat.engine.zero_init.Init.__init__",
    "compat.deepspeed.moe_layer.MoE.__init__",
    "ops.adam.DeepSpeedCPUAdam.__init__",
    "ops.adam.FusedAdam.__init__",
    "compat.deepspeed.schedules.OneCycle.__init__",
    "compat.deepspeed.optimizers.FusedLamb.__init__",
    "compat.deepspeed.tiled_linear.TiledLinear.__init__",
    "compat.deepspeed.sparsity_configs.FixedSparsityConfig.__init__",
    "compat.deepspeed.sparsity_configs.VariableSparsityConfig.__init__",
    "compat.deepspeed.sparsity_configs.BigBirdSparsityConfig.__init__",
    "compat.deepspeed.sparsity_configs.BSLongformerSparsityConfig.__init__",
    "compat.deepspeed.sparse_attention_utils.SparseAttentionUtils.pad_to_block_size",
}
# Subjects and verbs of people, and metaphors for what has a name: write the object, the operation and the
# field's term.
RIDDLES = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|tells?|told|says?|said|speaks?|hears?|heard|"
    r"reckon(?:ed|s)?|"
    r"judge[sd]?|promise[sd]?|passports?|nevertheless|made[ -]up|riddles?)\b",
    re.IGNORECASE,
)
RIDDLE_ALLOWED: dict[str, tuple[str, ...]] = {  # file → words that it needs
    "checkpoint/chunk_file.py": ("tell",),
    "checkpoint/chunk_archive.py": ("tell",),  # the method of files
    "compat/conversion/files/torch_file.py": ("tell",),
    "host/direct_file.py": ("tell",),
}


@dataclass(frozen=True)
class Function:
    """A function of the package. name: "room.module.Class.method"; parameters without self and cls."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_public: bool
    parameters: tuple[ast.arg, ...]
    owner: ast.ClassDef | None


def room_of(path: Path) -> str:
    """The folder below the package; "" for a module beside the folders."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def files_of(room: str) -> list[Path]:
    return [path for path in FILES if room_of(path) == room]


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def functions(path: Path) -> Iterator[Function]:
    """All functions of a file, nested ones too."""

    def walk(
        node: ast.AST, name: str, is_public: bool, owner: ast.ClassDef | None
    ) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(
                    child,
                    f"{name}.{child.name}",
                    is_public and not is_private(child.name),
                    child,
                )
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(
                    f"{name}.{child.name}",
                    child,
                    is_public and not is_private(child.name),
                    parameters_of(child, owner),
                    owner,
                )
                yield from walk(child, f"{name}.{child.name}", False, None)
            else:
                yield from walk(child, name, is_public, owner)

    name = module_name(path)
    yield from walk(
        tree_of(path), name, not any(map(is_private, name.split("."))), None
    )


def parameters_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None
) -> tuple[ast.arg, ...]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args]
    is_static = any(
        ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list
    )
    if owner is not None and not is_static:
        named = named[1:]
    return (
        *named,
        *arguments.kwonlyargs,
        *filter(None, (arguments.vararg, arguments.kwarg)),
    )


def is_of_autograd(function: Function) -> bool:
    return (
        function.owner is not None
        and function.node.name in AUTOGRAD
        and any(ast.unparse(base).endswith("Function") for base in function.owner.bases)
    )


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@cache
def documented_methods() -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    """Class of the package → (names of its bases, its methods with a docstring)."""
    found = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                bases = tuple(
                    re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2]
                    for base in node.bases
                )
                methods = frozenset(
                    f.name
                    for f in node.body
                    if isinstance(f, ast.FunctionDef) and ast.get_docstring(f)
                )
                found[node.name] = bases, methods
    return found


def has_docstring(function: Function) -> bool:
    if ast.get_docstring(function.node):
        return True
    waiting = [function.owner.name] if function.owner is not None else []
    while waiting:
        bases, methods = documented_methods().get(waiting.pop(), ((), frozenset()))
        if function.node.name in methods:
            return True
        waiting += bases
    return False


def missing_annotations(room: str) -> tuple[int, list[str]]:
    """(parameters counted, those without annotation)."""
    count, missing = 0, []
    for path in files_of(room):
        for function in functions(path):
            if function.is_public and not is_of_autograd(function):
                count += len(function.parameters)
                missing += [
                    f"{function.name}: {p.arg}"
                    for p in function.parameters
                    if p.annotation is None
                ]
    return count, missing


def missing_docstrings(room: str) -> tuple[int, list[str]]:
    """(things counted, those without docstring)."""
    count, missing = 0, []
    for path in files_of(room):
        name, tree = module_name(path), tree_of(path)
        things = {name: ast.get_docstring(tree) is not None}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not is_private(node.name):
                things[f"{name}.{node.name}"] = ast.get_docstring(node) is not None
        for function in functions(path):
            if (
                function.is_public
                and not is_dunder(function.node.name)
                and not is_of_autograd(function)
            ):
                things[function.name] = has_docstring(function)
        count += len(things)
        missing += [thing for thing, has in things.items() if not has]
    return count, missing


def test_public_parameters_are_annotated():
    for room in ROOMS:
        count, missing = missing_annotations(room)
        assert len(missing) <= (1 - ANNOTATED) * count, "\n".join(missing)


def test_public_names_have_docstrings():
    for room in ROOMS:
        count, missing = missing_docstrings(room)
        assert len(missing) <= (1 - DOCUMENTED) * count, "\n".join(missing)


def test_no_function_has_more_parameters_than_a_reader_can_hold():
    """More mean that a value is missing."""
    long = {
        f.name: len(f.parameters)
        for path in FILES
        for f in functions(path)
        if len(f.parameters) > MOST_PARAMETERS
        and not is_of_autograd(f)
        and f.name not in SIGNATURES_OF_DEEPSPEED
    }
    assert not long


def test_docstrings_comments_and_messages_use_plain_words():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}: {text}"
        for path in FILES
        for line, word, text in riddles(path)
    ]
    assert not found, "\n".join(found)


def riddles(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, word, text around it) of a file."""
    allowed = RIDDLE_ALLOWED.get(str(path.relative_to(PACKAGE)), ())
    source = path.read_text(encoding="utf-8")
    texts = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in (tokenize.STRING, tokenize.COMMENT)
    ]
    texts += [
        (node.lineno, node.name.replace("_", " "))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    for start, text in texts:
        for match in RIDDLES.finditer(text):
            if match[0].lower() not in allowed:
                line = start + text[: match.start()].count("\n")
                yield (
                    line,
                    match[0],
                    " ".join(
                        text[max(0, match.start() - 40) : match.end() + 40].split()
                    ),
                )


def nodes_of(path: Path) -> int:
    """Nodes of the syntax tree, without those that only mark how a name is used."""
    return sum(
        not isinstance(node, ast.Load | ast.Store | ast.Del)
        for node in ast.walk(tree_of(path))
    )


def test_no_file_outgrows_its_noun():
    """A file of 2,700 nodes is a hint to look for the seam; lines would count the formatter's work."""
    tests = [*(ROOT / "tools").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert not [path for path in FILES if nodes_of(path) > MOST_NODES]
    assert not [path for path in tests if nodes_of(path) > MOST_NODES_OF_TESTS]


if __name__ == "__main__":  # the state of every room: python -m tests.test_style
    for each in sorted({room_of(path) for path in FILES}):
        (parameters, bare), (things, silent) = (
            missing_annotations(each),
            missing_docstrings(each),
        )
        found = [riddle for path in files_of(each) for riddle in riddles(path)]
        longest = max(
            (
                len(f.parameters)
                for path in files_of(each)
                for f in functions(path)
                if not is_of_autograd(f)
            ),
            default=0,
        )
        print(
            f"{each or '(root)':16} annotated {1 - len(bare) / max(parameters, 1):6.1%}  documented "
            f"{1 - len(silent) / things:6.1%}  longest signature {longest:2}  riddles {len(found)}"
        )
