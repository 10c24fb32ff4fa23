"""The benchmarks of `make gpu` run on any machine: on the CPU, and their CUDA calls on a GPU that does not
exist."""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from itertools import chain
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import gpu_day, gpu_train, kernel_clock, kernel_contestants, kernels
from megatron_ds.ops import kernel_table
from megatron_ds.tensor_parallel import init
from tests.harness.emulated import emulated_gpu
from tests.harness.fake_cuda import FakeGpu, fake_cuda

pytestmark = pytest.mark.plan


def arguments(*more):
    return kernels.parse_arguments(
        [
            *"--device cpu --rehearse --no-compile --repeats 1 --dtypes fp32".split(),
            *more,
        ]
    )


def test_every_operation_with_an_example_is_measured():
    found = kernels.run(arguments())
    with_examples = {
        name
        for name, op in kernels.load_operations().items()
        if op.make_example is not None
    }
    assert (
        {row["operation"] for row in found["rows"]}
        == with_examples
        >= {"rms_norm", "gelu", "swiglu"}
    )
    assert [row for row in found["rows"] if row["why"]] == []
    norm = next(row for row in found["rows"] if row["operation"] == "rms_norm")
    assert (
        norm["forward_us"] > 0
        and norm["backward_us"] > 0
        and norm["forward_percent"] > 0
    )


def test_an_example_is_made_once_and_shared_by_contestants_but_for_what_they_change(
    monkeypatch,
):
    adamw, made, got = kernels.load_operations()["adamw"], [], []
    make = adamw.examples[0]
    monkeypatch.setattr(
        adamw, "examples", [lambda *size: made.append(make(*size)) or made[-1]]
    )
    monkeypatch.setattr(
        kernels, "measure", lambda row, function, arguments, *_: got.append(arguments)
    )
    kernel_contestants.written.cache_clear()
    kernels.run(arguments("--only", "adamw"))
    example, small = made  # the second is for the question what adamw changes
    [ours, torchs] = got
    assert ours[0] is torchs[0] is example[0]
    assert len({rows[0].p.data_ptr() for _, rows, _ in (example, ours, torchs)}) == 3
    assert torch.equal(ours[1][0].p, torchs[1][0].p) and torch.equal(
        ours[1][0].p, example[1][0].p
    )


def test_tensors_that_an_operation_changes_are_copied_for_each_contestant():
    adamw = kernels.load_operations()["adamw"]
    grad, first_row = (
        0,
        {1, 3, 4, 5},
    )  # weight, both moments and the 16-bit weight of a row
    changed = set(kernel_contestants.written(adamw, torch.bfloat16))
    assert grad not in changed and 2 not in changed and first_row <= changed


@pytest.mark.parametrize(
    "name, dtype, per_number",
    [
        ("adamw", "bf16", (30, 0)),
        ("adamw", "fp32", (28, 0)),
        ("cross_entropy_gradient_", "bf16", (4, 0)),
        ("cross_entropy_facts", "bf16", (2, 0)),
        ("swiglu", "bf16", (2 * 3, 2 * 5)),
        ("residual_norm", "bf16", (2 * 4, 2 * 4)),
    ],
)  # dy, the gradient of the sum, the sum; one result
def test_bytes_are_the_least_that_an_operation_moves(name, dtype, per_number):
    """The kernels for GPUs run in the emulator."""
    rows, width = (4, 4096) if "norm" in name else (64, 256)
    operation, dtype = kernels.load_operations()[name], kernels.DTYPES[dtype]
    kernel = next(
        entry.function for entry in operation.implementations if entry.name == "cuda"
    )
    with emulated_gpu():
        moved = kernel_clock.traffic(
            kernel,
            operation.make_example(rows, width, dtype, torch.device("cpu")),
            kernel_contestants.written(operation, dtype),
        )
    small = (
        0.35 if "norm" in name else 0.1
    )  # rows of weights and their gradients, scalars of rows
    for got, expected in zip(moved, per_number):
        assert expected <= got / (rows * width) <= expected * (1 + small)


def test_no_benchmark_draws_many_numbers_with_the_cpu(monkeypatch):
    drawn, permutation = {"cpu": 0, "meta": 0}, torch.randperm

    class Draw:
        def __init__(self, device="cpu"):
            self.device = torch.device(device)

        def manual_seed(self, seed):
            return self

    def draw(*shape, generator, device="cpu"):
        shape = shape if isinstance(shape[0], int) else shape[0]
        drawn[torch.device(device).type] += math.prod(shape)
        return torch.empty(shape, device="meta")

    monkeypatch.setattr(torch, "Generator", Draw)
    monkeypatch.setattr(torch, "randn", draw)
    monkeypatch.setattr(torch, "rand", draw)
    monkeypatch.setattr(torch, "randperm", lambda n, generator: permutation(n))
    for operation in kernels.load_operations().values():
        for size in operation.benchmark_sizes if operation.make_example else ():
            operation.make_example(*size, torch.bfloat16, torch.device("meta"))
    assert drawn["meta"] > 1e9 and drawn["cpu"] < 1e7


def test_operations_with_goals_are_first_and_compilations_last():
    rows = kernels.planned_rows(kernels.parse_arguments(["--device", "cuda:0"]))
    names = list(dict.fromkeys(row.operation for row in rows))
    assert set(names[: len(kernels.GOALS)]) == set(kernels.GOALS)
    compiled = [row.contestant == "torch.compile" for row in rows]
    assert sum(compiled) > 50 and compiled == sorted(compiled)
    by_torch = [row.operation for row in rows if row.contestant != "torch.compile"][-1]
    assert [row.contestant for row in rows if row.operation == by_torch][0] == "torch"
    heads = {
        row.width
        for row in rows
        if row.operation in ("attention", "apply_rotary", "split_rotary")
    }
    assert heads == {128}
    assert {row.rows * row.width for row in rows if row.operation == "adamw"} >= {
        317_383 * 4096
    }
    on_cpu = kernels.planned_rows(kernels.parse_arguments(["--device", "cpu"]))
    assert max(row.rows * row.width for row in on_cpu) < 1e9


def test_rows_beyond_the_budget_are_named_and_the_others_kept(
    tmp_path, capsys, monkeypatch
):
    class Time:
        seconds = 0.0

        @classmethod
        def monotonic(cls):
            cls.seconds += 0.001
            return cls.seconds

    def slow(row, *_):
        Time.seconds += 10
        row.forward_us = row.forward_percent = 1.0

    monkeypatch.setattr(kernels, "time", Time)
    monkeypatch.setattr(kernels, "measure", slow)
    file = tmp_path / "rows.json"
    kernels.run(
        arguments(
            "--only", "swiglu", "residual_norm", "--budget", "15", "--json", str(file)
        )
    )
    rows = json.loads(file.read_text())["rows"]
    ran = [row for row in rows if not row["why"]]
    assert [row["operation"] for row in ran] == ["residual_norm"] * 2
    left = [row for row in rows if row["why"] == "not run"]
    assert len(left) == len(rows) - 2 >= 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        f"not run within the budget, {len(left)} of {len(rows)} rows: swiglu fp32 8×64 "
    )


def test_figures_remain_if_the_program_is_stopped(tmp_path, monkeypatch):
    def stopped(row, *_):
        if row.contestant == "torch":
            raise KeyboardInterrupt
        row.forward_us = row.forward_percent = 1.0

    monkeypatch.setattr(kernels, "measure", stopped)
    file = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        kernels.run(arguments("--only", "gelu", "--json", str(file)))
    ours, torchs = json.loads(file.read_text())["rows"]
    assert ours["forward_us"] == 1 and not ours["why"] and torchs["why"] == "not run"


def test_goals_that_are_met_and_missed_are_named():
    rows = [
        kernels.Row(
            "residual_norm", "bf16", 8192, 4096, "ours", 40.0, 91.0, 60.0, 70.0
        ),
        kernels.Row(
            "residual_norm", "bf16", 8192, 4096, "torch", 90.0, 50.0, 60.0, 30.0
        ),
        kernels.Row("cross_entropy_facts", "bf16", 8192, 50304, "ours", why="not run"),
        kernels.Row("adamw", "bf16", 317_383, 4096, "ours", 10_200.0, 95.0),
        kernels.Row("adamw", "bf16", 8192, 4096, "ours", 400.0, 95.0),
    ]
    assert list(kernels.goal_lines(rows)) == [
        "goal of residual_norm bf16 8192×4096 ours: missed, forward 91.0 % of 90, backward 70.0 % of 75",
        "goal of cross_entropy_facts bf16 8192×50304 ours: not run",
        "goal of adamw bf16 317383×4096 ours: met, 10200 µs of 10300",
    ]


def test_slow_calls_are_repeated_less_often(monkeypatch):
    count, now = [0], [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(kernel_clock, "time", clock)

    def call():
        count[0] += 1
        now[0] += 0.02

    [us] = kernel_clock.Clock(
        torch.device("cpu"), repeats=30, seconds=0.01
    ).microseconds(call)
    assert count[0] == 2 and us == pytest.approx(20_000)
    [us] = kernel_clock.Clock(torch.device("cpu"), repeats=3).microseconds(lambda: None)
    assert us == 0


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_model_is_measured_beside_its_plan(device):
    args = gpu_train.parse_arguments(
        ["--device", device, "--steps", "2", "--rehearse", "--", "--kernels", "torch"]
    )
    shape = gpu_train.REHEARSED["headline"]["gpt-tiny"]
    with kernel_table.selected("torch"), fake_cuda(), FakeGpu() as gpu:
        rows = gpu_train.measure("gpt-tiny", shape, args)
    assert [row["micro_batches"] for row in rows] == [1, 3]
    for row in rows:
        assert row["layers"] == 2 and row["step_s"] > 0 and row["planned_gib"] > 0
        if device != "cpu":
            assert row["mfu"] > 0 and row["allocated_gib"] == 1
    assert rows[-1]["step_kernels"] and not gpu.order.problems


def test_weights_are_drawn_where_they_are_and_not_by_one_thread_of_the_host(
    monkeypatch,
):
    def draw(*_):
        raise AssertionError("the host draws")

    monkeypatch.setattr(init, "generator_of", draw)
    words = ["--device", "cpu", "--steps", "2", "--rehearse"]
    args = gpu_train.parse_arguments(words)
    shape = gpu_train.REHEARSED["headline"]["llama-tiny"]
    with kernel_table.selected("torch"):
        [row, _] = gpu_train.measure("llama-tiny", shape, args)
    assert abs(row["losses"][0] - math.log(131)) < 1


def test_the_most_layers_that_fit_are_taken():
    args = gpu_train.parse_arguments(["--device", "cuda:0", "--rehearse"])
    device = torch.device("cuda", 0)
    shape = gpu_train.Shape(gpu_train.SMALL, (64, 2))
    with fake_cuda(), FakeGpu():
        _, planned, layers = gpu_train.fitting("tiny", shape, device, args.more)
        assert layers == 64 and planned > 0


def test_at_most_two_numbers_of_layers_are_planned(monkeypatch):
    """A plan takes seconds; memory grows evenly between them."""
    shape = gpu_train.Shape(gpu_train.SMALL, (12, 8, 6, 4, 2))
    cpu = torch.device("cpu")
    exact = gpu_train.peak_of(shape, 6, cpu, [])
    peak, planned = gpu_train.peak_of, []

    def counted(shape, layers, *more):
        planned.append(layers)
        return peak(shape, layers, *more)

    monkeypatch.setattr(gpu_train, "peak_of", counted)
    monkeypatch.setattr(gpu_train, "free_memory", lambda _: exact * 1.02 / 0.94)
    config, found, layers = gpu_train.fitting("tiny", shape, cpu, [])
    assert (layers, planned) == (6, [12, 2]) and config.model.num_layers == 6
    assert abs(found - exact) < 0.02 * exact
    monkeypatch.setattr(gpu_train, "free_memory", lambda _: 1000)
    with pytest.raises(MemoryError, match="2 layers need"):
        gpu_train.fitting("tiny", shape, cpu, [])


def test_a_model_that_fails_costs_its_own_figures_only(tmp_path, monkeypatch, capsys):
    def measure(name, *_):
        if name == "gpt-tiny":
            raise RuntimeError("no kernel image is available")
        if name == "llama-tiny":
            raise MemoryError("2 layers need too much")
        return [{"model": name}]

    monkeypatch.setattr(gpu_train, "measure", measure)
    monkeypatch.setattr(gpu_train, "text_of", str)
    file = tmp_path / "models.json"
    words = ["--device", "cpu", "--rehearse", "--json", str(file)]
    assert gpu_train.main(gpu_train.parse_arguments(words)) == 1
    found = {row["model"]: row.get("error", "") for row in json.loads(file.read_text())}
    assert found["gpt-tiny"] == "RuntimeError: no kernel image is available"
    assert found["llama-tiny"] == "MemoryError: 2 layers need too much"
    assert found.keys() == gpu_train.REHEARSED["all"].keys()
    assert not found["mixtral-tiny"]
    assert "in measure" in capsys.readouterr().out  # the place of the failure
    words += ["--only", "llama-tiny", "mixtral-tiny"]
    assert gpu_train.main(gpu_train.parse_arguments(words)) == 0


def test_the_host_leads_before_the_first_call(monkeypatch):
    """The device sleeps after the caches are overwritten and before the first stamp."""
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    with fake_cuda(), FakeGpu():
        clock = kernel_clock.Clock(torch.device("cuda", 0), repeats=2)
        clock.microseconds(lambda: None)
    assert slept and set(slept) == {kernel_clock.HOST_LEAD}


def test_all_commands_name_files_and_flags_that_exist(tmp_path, monkeypatch):
    calls = [*gpu_day.PARTS.values(), *gpu_day.REHEARSED.values()]
    for part in chain.from_iterable(calls):
        for word in part.command.split():
            if word.endswith(".py") or word.startswith("tests/"):
                assert (gpu_day.ROOT / word).exists(), word
    monkeypatch.setattr(gpu_day, "machine", dict)
    one = gpu_day.Part("one", "PYTHON -c print('seen')", 20)
    monkeypatch.setattr(gpu_day, "REHEARSED", {"truth": (one,)})
    assert gpu_day.main(["--rehearse", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "gpu-truth.json").read_text())
    assert results["parts"]["one"]["output"] == ["seen"]


@pytest.mark.parametrize("calls", [gpu_day.PARTS, gpu_day.REHEARSED])
def test_each_call_of_the_day_ends_within_nine_minutes(calls):
    assert calls.keys() == {"headline", "truth", "rest"}
    for name, parts in calls.items():
        assert gpu_day.estimate(parts) <= 540, name
        limits = sum(part.seconds + gpu_day.LAST_WORDS for part in parts)
        assert gpu_day.estimate(parts) >= limits + 30, name


def test_all_models_and_tests_of_a_gpu_are_in_a_call():
    commands = " ".join(p.command for parts in gpu_day.PARTS.values() for p in parts)
    for path in (gpu_day.ROOT / "tests/gpu").glob("test_*.py"):
        assert f"tests/gpu/{path.name}" in commands, path.name
    for group in gpu_train.GROUPS.keys() - {"all"}:
        assert f"--group {group}" in commands, group
    assert list(gpu_train.BEYOND)[-1] == "gpt-1.3b-dropout"
    assert all(1 in shape.micro_batches for shape in gpu_train.HEADLINE.values())


# ------------------------------------------------------------------------------- Liger, a stand-in
class SwiGLU(torch.autograd.Function):
    """Two contiguous tensors, which its backward overwrites."""

    @staticmethod
    def forward(ctx, gate, up):
        assert gate.is_contiguous() and up.is_contiguous() and gate.shape == up.shape
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        return gate.copy_(dy), up.copy_(dy)


class Rope(torch.autograd.Function):
    """q [b, n, s, d] and k [b, g, s, d] in memory [b, s, n, d], which are overwritten; cos, sin [1, s, d]."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()
        assert q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
        assert cos.shape == sin.shape == (1, *q.shape[2:]) and cos.dtype == q.dtype
        return q * 1, k * 1, cos.view_as(cos), sin.view_as(sin)

    @staticmethod
    def backward(ctx, dq, dk, *_):
        return dq, dk, None, None, None, None


def cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,  # noqa: A002
    reduction="mean",
    label_smoothing=0.0,
):
    assert input.requires_grad and reduction == "sum" and label_smoothing == 0.1
    assert ((target == ignore_index) | (target >= 0) & (target < input.shape[1])).all()
    return torch.nn.functional.cross_entropy(
        input.float(),
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None


@pytest.fixture
def liger(monkeypatch):
    """`liger_kernel` with the signatures of its releases."""
    names = {
        "ops.swiglu": ("LigerSiLUMulFunction", SwiGLU),
        "ops.rope": ("LigerRopeFunction", Rope),
        "ops.rms_norm": ("LigerRMSNormFunction", RMSNorm),
        "transformers.functional": ("liger_cross_entropy", cross_entropy),
    }
    for name in ("", "ops", "transformers", *names):
        module = ModuleType(f"liger_kernel.{name}".rstrip("."))
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None), []
        if name in names:
            setattr(module, *names[name])
        monkeypatch.setitem(sys.modules, module.__name__, module)


LIGERS = ("rms_norm", "swiglu", "apply_rotary", "cross_entropy_gradient_")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_liger_is_measured_where_it_is_installed(liger, dtype):
    rows = kernels.run(arguments("--only", *LIGERS, "--dtypes", dtype))["rows"]
    of_liger = {row["operation"]: row for row in rows if row["contestant"] == "liger"}
    assert set(LIGERS) == {name for name, row in of_liger.items() if not row["why"]}
    for name, row in of_liger.items():
        if name in LIGERS:
            assert row["forward_us"] > 0 and (
                row["backward_us"] is None
            ) == name.startswith("cross_entropy")
    # The stand-in has no module for this one, as a release under another name would not.
    assert of_liger.keys() - set(LIGERS) <= {"layer_norm"}


def test_a_liger_with_other_names_costs_its_own_rows_only(liger, monkeypatch):
    monkeypatch.delattr(sys.modules["liger_kernel.ops.swiglu"], "LigerSiLUMulFunction")
    rows = kernels.run(arguments("--only", "swiglu"))["rows"]
    assert {row["contestant"]: row["why"] for row in rows}["liger"].startswith(
        "AttributeError: "
    )
    assert {row["why"] for row in rows if row["contestant"] != "liger"} == {""}


def test_liger_has_arguments_of_its_own_and_leaves_those_of_the_others_alone(liger):
    for name in LIGERS[1:]:
        operation = kernels.load_operations()[name]
        example = operation.make_example(6, 16, torch.float32, torch.device("cpu"))
        before = [t.detach().clone() for t in kernel_clock.tensors_of(example)]
        entrant = kernel_contestants.contestant(operation, "liger", torch.float32)
        given = entrant.arguments(example)
        made = entrant.function(*given)
        if name != "cross_entropy_gradient_":
            trained = [t for t in kernel_clock.tensors_of(given) if t.requires_grad]
            made = kernel_clock.tensors_of(made)
            torch.autograd.grad(made, trained, [torch.ones_like(t) for t in made])
        assert all(
            torch.equal(t, b)
            for t, b in zip(kernel_clock.tensors_of(example), before, strict=True)
        )


def test_without_liger_there_are_no_rows_of_it(monkeypatch):
    monkeypatch.setattr(kernel_contestants, "has_liger", lambda: False)
    assert "liger" not in {row.contestant for row in kernels.planned_rows(arguments())}
