"""Experts padded to their capacity: the results of experts that are not, and memory and traffic that are planned
exactly."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.batch import Batch
from megatron_ds.models import MODELS, build_stage
from megatron_ds.moe.dispatch import Dispatch
from megatron_ds.moe.mixture import MixtureOfExperts
from megatron_ds.moe.padded import PaddedDispatch
from megatron_ds.mpu.columns import columns_of_rows, rows_of_columns
from megatron_ds.mpu.context import ParallelContext, Precision
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.pipeline.stage import Stage
from megatron_ds.planning.fake_stages import StageRunner, without_memory
from megatron_ds.planning.run_model import boundary_shape, describe_layers
from megatron_ds.planning.run_plan import PipelineShape, plan_run
from megatron_ds.planning.world_plan import plan_world
from tests.harness.alive_bytes import AliveBytes
from tests.harness.layout_runs import reference_of, run_layout
from tests.harness.threads import run_ranks
from tests.threads.test_rank_plan import BATCH, LAYERS, STEPS, check, parsed
from tools.compare_layouts import SEQ_LENGTH, TOLERANCE, tiny_job
from tools.layout_comparison import difference

PAD = "--moe-pad-expert-input-to-capacity"
MOE = ["--num-experts", "4", "--moe-router-dtype", "fp64", "--moe-aux-loss-coeff", "0.01",
       "--moe-expert-capacity-factor"]
FEW = 4


# ------------------------------------------------------------------ equal to experts that are not padded
@pytest.mark.parametrize("style, factor, layout", [
    ("gpt2", "0.8", "tp=2"), ("gpt2", "1.7", "tp=2,sp=1,dp=2,ep=2"), ("llama", "0.8", "dp=4,ep=4"),
    ("llama", "0.8", "dp=2,ep=2,pp=2,schedule=zb-h1"), ("gpt2", "1.2", "tp=2,dp=2,ep=2,recompute=full"),
    ("llama", "1.2", "tp=2,sp=1,dp=4,ep=2,zero=3"), ("gpt2", "1.2", "dp=2,ep=2,recompute=selective,zero=1")])
def test_training_is_that_of_one_process_without_padding(style, factor, layout):
    """4 tokens of 24 an expert at the least factor, of which it takes 10; so slots drop, and places stay empty.
    """
    job = [*tiny_job(style, "fp32", True, 0.0, 3, 4, FEW), *MOE, factor]
    run, reference = run_layout([*job, PAD], layout, FEW), reference_of(job, layout, FEW)
    assert difference(run.merged, reference.merged, run.model).is_within(TOLERANCE["fp32"])


def test_in_bf16_training_follows_that_without_padding():
    job = [*tiny_job("llama", "bf16", True, 0.0, 2, 4, FEW), *MOE, "1.2"]
    run, plain = (run_layout([*job, *flags], "tp=2,sp=1,dp=2,ep=2", FEW) for flags in ([PAD], []))
    assert difference(run.merged, plain.merged, run.model).is_within(TOLERANCE["bf16"])


def layer(scope: str, padded: bool, factor: str) -> MixtureOfExperts:
    """In fp64, with biases that are not zero."""
    job = [*tiny_job("gpt2", "fp32", True, 0.0, 2, 4, FEW), *MOE, factor, "--moe-capacity-scope", scope]
    config = parse([*job, *([PAD] if padded else [])], world_size=1).model
    made = MixtureOfExperts(config, 4, "mlp", ParallelContext(precision=Precision(torch.float64)),
                            output_std=0.3)
    torch.manual_seed(5)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return made


@pytest.mark.parametrize("scope", ["sequence", "micro-batch"])
@pytest.mark.parametrize("factor", ["0.5", "1.0", "7"])
def test_empty_places_add_nothing_to_outputs_and_gradients(scope, factor, monkeypatch):
    """Biases make the results of empty rows other than zero; at the greatest factor most rows are empty."""
    batch = MODELS["gpt"].data.blank(3, SEQ_LENGTH)
    x = torch.randn(SEQ_LENGTH, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for padded in (True, False):
        seen = []
        watched = PaddedDispatch if padded else Dispatch
        monkeypatch.setattr(watched, "arrive", watching(watched.arrive, seen))
        mlp, given = layer(scope, padded, factor), x.clone().requires_grad_()
        y = mlp(given, batch)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        results.append((y, given.grad, *(p.grad for p in mlp.parameters())))
        monkeypatch.undo()
        assert (sum(seen[0].counts) == len(seen[0].counts) * seen[0].counts[0] == 4 * places(factor, scope)
                ) is padded
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*results, strict=True))


def places(factor: str, scope: str) -> int:
    sets, tokens = (3, SEQ_LENGTH) if scope == "sequence" else (1, 3 * SEQ_LENGTH)
    return sets * min(tokens, -(-int(float(factor) * 10) * 2 * tokens // 40))


def watching(arrive, seen: list):
    def watched(self, rows):
        seen.append(self)
        return arrive(self, rows)
    return watched


@pytest.mark.parametrize("size", [2, 3])
def test_rows_and_columns_change_places_forward_and_backward(size):
    whole = torch.arange(5 * size * 2 * size, dtype=torch.float64).view(5 * size, 2 * size)

    def main(rank, world):
        group = Mesh(parse_grid(size), rank, world.connect, torch.device("cpu")).group("tp")
        x = whole.chunk(size)[rank].clone().requires_grad_()
        y = columns_of_rows(x, group)
        back = rows_of_columns(y, group)
        back.backward(whole.chunk(size)[rank] * 3)
        return y, back, x.grad

    for rank, (y, back, grad) in enumerate(run_ranks(size, main)):
        mine = whole.chunk(size)[rank]
        assert torch.equal(y, whole.chunk(size, dim=1)[rank]) and torch.equal(back, mine)
        assert torch.equal(grad, 3 * mine)


def parse_grid(tp: int):
    return parse(["--num-layers", "1", "--hidden-size", "6", "--num-attention-heads", "6", "--seq-length", "6",
                  "--micro-batch-size", "1", "--lr", "1", "--train-iters", "1", "--mock-data", "--vocab-size",
                  "9", "--tensor-model-parallel-size", str(tp)], world_size=tp).grid()


# ------------------------------------------------------------------ as planned
LAYOUTS = ["dp=2,ep=2", "tp=2,sp=1,dp=2,ep=2,zero=1", "tp=2,dp=2,ep=2,zero=3", "tp=2,sp=1,pp=2",
           "dp=4,ep=2,pp=2,zero=2,recompute=full"]


@pytest.mark.parametrize("number, layout", list(enumerate(LAYOUTS)), ids=str)
def test_every_rank_sends_and_holds_what_was_planned(number, layout):
    """To the call and to the byte, with a dense block, shared experts and a bias of the routers."""
    style = ("llama", "bf16", True, 0.0) if number % 2 else ("gpt2", "fp32", False, 0.1)
    job = [*tiny_job(*style, LAYERS, BATCH, STEPS), *MOE, "1.2", PAD, "--moe-layer-freq", "[0,1,1,1]",
           "--moe-shared-expert-intermediate-size", "24", "--moe-router-score-function", "sigmoid",
           "--moe-router-enable-expert-bias"]
    check(job, layout)
    sent = plan_world(parsed(job, layout), 0, "cpu").rank_plan(0).traffic.calls
    assert not any(operation == "all_to_all" and axes == "ep" for operation, axes, _ in sent)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("flags", [[], ["--bf16"], ["--recompute-granularity", "full"]], ids=" ".join)
@pytest.mark.parametrize("layout", ["", "tp", "sp", "sp ep"])
def test_a_stage_keeps_what_was_planned_to_the_byte(layout, flags, samples):
    """The second and third block, on ranks that exchange real tokens."""
    tp, ep = 2 if layout[:2] in ("tp", "sp") else 1, 2 if "ep" in layout else 1
    job = [*tiny_job("llama", "fp32", True, 0.0, 3, samples * ep, 1), *MOE, "1.2", PAD, *flags,
           "--micro-batch-size", str(samples), "--tensor-model-parallel-size", str(tp),
           "--expert-model-parallel-size", str(ep), *(["--sequence-parallel"] if "sp" in layout else [])]
    config = parse(job, world_size=tp * ep)
    assert len(set(run_ranks(tp * ep, lambda rank, world: kept(config, rank, world)))) == 1
    for measured, planned in run_ranks(tp * ep, lambda rank, world: (kept(config, rank, world),
                                                                     planned_to_keep(config, rank))):
        assert measured == planned > 0


def kept(config, rank: int, world) -> int:
    """Bytes that a forward of the second and third block leaves behind on a rank."""
    mesh = Mesh(config.grid(), rank, world.connect, torch.device("cpu"))
    modules = build_stage(describe_layers(config, mesh)[2:4])
    for p in modules.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(3))
    stage = Stage(0, list(modules), is_first=False, is_last=False, loss=None)
    held: list[Batch] = []
    with AliveBytes() as alive:
        for k in range(2):                      # the second: what a rank holds once is there already
            held.append(MODELS[config.model.model].data.blank(config.train.micro_batch_size, SEQ_LENGTH))
            given = alive.now()
            x = torch.randn(boundary_shape(config), generator=torch.Generator().manual_seed(k))
            stage.forward(k, held[-1], x.to(modules[0].input_layernorm.weight.dtype), 1.0)
            del x
            measured = alive.now() - given
    return measured


def planned_to_keep(config, rank: int) -> int:
    mesh = fake_mesh(config.grid(), rank, "cpu")
    plan = plan_run(config, describe_layers(config, mesh))
    plan = replace(plan, bounds=(0, 2, 4, len(plan.layers)), shape=PipelineShape("1f1b", 3, 1))
    with without_memory("cpu") as where:
        [stage] = StageRunner(config, mesh, plan, where, frozenset()).stages_of(1)
    return stage.run.kept
