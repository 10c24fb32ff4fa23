"""A rule for sources: the core and its extensions read values of a GPU by mpu/host_reads.py, whose wait has an end.

A plain `.item()`, `.cpu()` or `synchronize()` behind a collective of NCCL never returns if a peer does not come, and
nothing then names the rank. Sources do not tell where a tensor is, so every plain read is either one of
host_reads.py or in the table below, with the reason why it waits for no other rank. A `copy_` is a read where the
function itself has made the target on the host.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.syntax import tree_of

pytestmark = pytest.mark.plan

PACKAGE = Path(__file__).parents[2] / "megatron_ds"
READS = set("item cpu tolist synchronize nonzero masked_select".split())
REDUCTIONS = set("all any sum max min amax amin isfinite isnan argmax".split())
CASTS = {"bool", "int", "float"}
MAKERS = set("empty zeros ones full from_numpy frombuffer".split())

HOST = "arrays of numpy or tensors of the host"
WAITED = "the caller has waited for the work of the device (wait_for_work)"
ONE_RANK = "one process measures or checks, without collectives before"
FIRST = "the first kernel of a process: the driver makes its context"
THE_WAIT = "the wait itself, or its plain read where there are no other ranks"

# Beginnings of "file:function", each with the reason. The wing of other programs' dialects is not read.
ALLOWED = {
    "batch/documents.py:boundaries_of": HOST,
    "checkpoint/storage.py:_write_file": WAITED,
    "data/": HOST,
    "extensions/bert/": HOST,
    "extensions/chat/": HOST,
    "extensions/corpora/": HOST,
    "extensions/data_efficiency/curriculum_": HOST,
    "extensions/data_efficiency/difficulty_": HOST,
    "extensions/data_efficiency/seqlen_curriculum.py:_from_zero": HOST,
    "extensions/evaluation/scorer.py:Scored.total": HOST,
    "extensions/evaluation/scorer.py:Scorer._run": HOST,
    "extensions/fim/fill_in_middle.py:FillInMiddle._rearranged": HOST,
    "extensions/fim/fill_in_middle.py:_cut": HOST,
    "extensions/generation/generator.py:Generator._advance": HOST,
    "extensions/tokenizers/": HOST,
    "extensions/kernels/cpu/": HOST,
    "extensions/kernels/gpu/cuda_backend.py:_backend": FIRST,
    "extensions/kernels/gpu/fp32_sums.py:_error": ONE_RANK,
    "extensions/preference/answer_": HOST,
    "host/direct_file.py:BlockFile.write_tensor": HOST,
    "mpu/channels.py": HOST,
    "mpu/host_reads.py": THE_WAIT,
    "ops/attention_tiles.py": HOST,
    "ops/block_layout.py": HOST,
    "extensions/kernels/gpu/kernel_check.py:tensor_error": ONE_RANK,
    "ops/attention_pattern.py:AttentionPattern.pairs_between": HOST,
    "planning/layer_costs.py:_now": ONE_RANK,
    "extensions/guards/replica_check.py:_digest": WAITED,
    "training/run_checkpoint.py:not_finite": WAITED,
}


def plain_reads(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, int, str]]:
    """(qualified name of the function, line, source) of each read for which the host may wait."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}".lstrip(".")
        if isinstance(node, ast.FunctionDef):
            for copy in copies_to_host(node):
                yield name, copy.lineno, ast.unparse(copy)
        if is_plain_read(node):
            yield inside, node.lineno, ast.unparse(node)
        for condition in conditions_of(node):
            if method_of(condition) in REDUCTIONS - {"isfinite", "isnan"}:
                yield inside, condition.lineno, ast.unparse(condition)
        yield from plain_reads(node, name)


def is_plain_read(node: ast.AST) -> bool:
    """A method that brings values to the host, or a number made of a reduction."""
    if method_of(node) in READS:
        return True
    if method_of(node) == "to":
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(isinstance(a, ast.Constant) and a.value == "cpu" for a in given)
    is_cast = isinstance(node, ast.Call) and getattr(node.func, "id", "") in CASTS
    return is_cast and any(method_of(a) in REDUCTIONS for a in node.args)


def copies_to_host(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Copies that the host waits for, into tensors that the function has made on the host."""
    names = {
        ast.unparse(target)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and is_made_on_host(node.value)
        for target in node.targets
    }
    for node in ast.walk(function):
        if method_of(node) != "copy_":
            continue
        target = node.func.value
        while isinstance(target, ast.Subscript):  # a part of it
            target = target.value
        waits = not any(keyword.arg == "non_blocking" for keyword in node.keywords)
        if waits and (is_made_on_host(target) or ast.unparse(target) in names):
            yield node


def is_made_on_host(node: ast.AST) -> bool:
    """Whether a node is a call such as torch.empty without a device."""
    is_maker = method_of(node) in MAKERS and ast.unparse(node.func.value) == "torch"
    return is_maker and not any(keyword.arg == "device" for keyword in node.keywords)


def method_of(node: ast.AST) -> str:
    """The name of the method that a node calls, "" for other nodes."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_method else ""


def conditions_of(node: ast.AST) -> list[ast.AST]:
    """What a node takes as true or false."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return node.ifs if isinstance(node, ast.comprehension) else []


def test_reads_of_each_form_are_found():
    text = """
def f(x, event):
    x.item(), x.cpu(), x.tolist(), x.to("cpu"), x.to(device="cpu", copy=True)
    torch.cuda.synchronize(), event.synchronize(), x.nonzero()
    bool((x > 1).any()), int(x.max())
    if not x.any() or x.all():
        return [y for y in x if y.any()]
    near = torch.empty(8, dtype=x.dtype)
    near.copy_(x), near[2:4].copy_(x), torch.zeros(3).copy_(x)
"""
    found = list(plain_reads(ast.parse(text)))
    assert len(found) == 16 and {name for name, *_ in found} == {"f"}
    free = "x.to(device), any(x), bool(x), math.isfinite(y) and z, read_number(x.any())"
    assert not list(plain_reads(ast.parse(free)))
    copies = """
def f(x, given):
    far, near = torch.empty(8, device=x.device), torch.empty(8, pin_memory=True)
    there = torch.zeros(8, device="cuda")
    there.copy_(x), given.copy_(x), near.copy_(x, non_blocking=True)
"""
    assert not list(plain_reads(ast.parse(copies)))


def test_each_plain_read_has_a_reason_why_it_waits_for_no_other_rank():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] == "compat":
            continue
        for name, line, source in plain_reads(tree_of(path)):
            reads = found.setdefault(f"{place.as_posix()}:{name}", [])
            reads.append(f"line {line}: {source}")
    allows = {
        entry: [where for where in found if where.startswith(entry)]
        for entry in ALLOWED
    }
    unbounded = {
        where: reads
        for where, reads in found.items()
        if not where.startswith(tuple(ALLOWED))
    }
    assert not unbounded, "read these by mpu/host_reads.py, or give the reason"
    assert all(allows.values()), "some entries of the table allow nothing any more"
