"""Steps of the CUDA path on a GPU that does not exist: every use of memory by two streams is ordered by an
event, the host waits for the device once a step, and the run trains like one on the CPU.

The values are those of the CPU's operations, so differences are of rounding: other implementations are chosen
for a GPU. The order is checked on the recording (tests/harness/stream_order.py), not by luck.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.context_parallel import block_exchange
from megatron_ds.errors import CommunicationError
from megatron_ds.host import places
from megatron_ds.host.place_file import PlaceWriter, read_places
from megatron_ds.host.side_streams import Mark, SideStream, side_stream
from megatron_ds.mpu import device_wait
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops import attention_tiles, kernel_table, partial_attention
from megatron_ds.ops.attention_tiles import TileLimits
from megatron_ds.pipeline import device_place, passes
from megatron_ds.pipeline import simulate as simulation
from megatron_ds.pipeline.executor import Executor
from megatron_ds.pipeline.instruction import Instruction, Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import simulate
from megatron_ds.training.step_metrics import StepMetrics
from megatron_ds.zero import tiers
from megatron_ds.zero.arrival import Arrivals
from megatron_ds.zero.data_groups import DataGroups
from tests.harness.fake_cuda import CUDA, DEFAULT, FakeGpu, fake_cuda, gpu
from tests.harness.fake_nccl import FakeNccl, FakeWork
from tests.harness.hardware_queue import blocked_queues
from tests.harness.layout_comparison import (
    difference,
    merge,
    parse_layout,
    random_samples,
    train_layout,
)
from tests.harness.stream_order import HOST, place
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, TOLERANCE, VOCAB, tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(6)]

STEPS = 2
LAYERS = 3
BATCH = 4
THE_WAIT = "training/step.py"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01".split()


@dataclass
class Run:
    """merged: (trace, weights). gpus: of each rank; none on the CPU."""

    merged: tuple
    model: object
    gpus: list

    @property
    def orders(self) -> list:
        """What was recorded on each rank."""
        return [gpu.order for gpu in self.gpus]

    def page_locked(self, place: str) -> list[int]:
        """The bytes of page-locked memory that each rank took at a place in the package."""
        return [
            sum(block.taken for block in gpu.page_locked if place in block.place)
            for gpu in self.gpus
        ]

    @property
    def problems(self) -> list[str]:
        return sorted({problem for order in self.orders for problem in order.problems})

    def waits(self) -> list[Counter]:
        """How often the host of each rank waited in training steps, by place."""
        return [
            Counter(
                wait
                for wait in order.waits
                if "init.py" not in wait
                and "a test" not in wait
                and "keep_gathered.py" not in wait
                and "(_unlock)" not in wait  # of memory, at the end of a run
                # of a kernel before its first use, once in a process
                and "kernel_check.py" not in wait
                and "kernel_table.py" not in wait
                # tables of a device, once in a process
                and "normal_float.py" not in wait
            )
            for order in self.orders
        ]


def train(
    layout: str, device: str, dtype: str = "fp32", more: tuple[str, ...] = ()
) -> Run:
    request = parse_layout(layout, mbs="1")
    config = parse(
        [
            *tiny_job("gpt2", dtype, False, 0.0, LAYERS, BATCH, STEPS),
            "--kernels",
            "torch",
            *request.flags,
            *more,
        ],
        world_size=request.world_size,
    )
    samples, gpus = random_samples(4 * BATCH, SEQ_LENGTH, VOCAB, seed=1), {}

    def main(rank, world):
        if device == "cpu":
            mesh = Mesh(
                config.grid(request.world_size),
                rank,
                world.connect,
                torch.device("cpu"),
            )
            return train_layout(config, mesh, STEPS, samples)

        def connect(axes, groups, rank):
            transport = world.connect(axes, groups, rank)
            return transport and FakeNccl(transport, axes)

        with FakeGpu() as gpu:
            gpus[rank] = gpu
            mesh = Mesh(
                config.grid(request.world_size), rank, connect, torch.device("cuda", 0)
            )
            return train_layout(config, mesh, STEPS, samples)

    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(fake_cuda())
            stack.enter_context(kernel_table.selected("torch"))  # as it was, at the end
        merged = merge(run_ranks(request.world_size, main))
    return Run(merged, config.model, [gpus[rank] for rank in sorted(gpus)])


DROPOUT = (
    "--hidden-dropout 0.1 --attention-dropout 0.1 --num-layers 1 --global-batch-size 1"
)
WINDOW, DOCUMENTS = (
    ("--window-size", "5,0"),
    ("--reset-position-ids", "--reset-attention-mask"),
)
# Two layers and two micro-batches have each kind of operation.
FEW = ("--num-layers", "2", "--global-batch-size", "2")
ALIBI, MUON = ("--position-embedding-type", "alibi"), ("--optimizer", "muon")
CASES = [
    ("zero=0,dp=2", "fp32", 1),
    ("zero=1,dp=2", "fp16", 1),
    ("zero=2,dp=2,comm=fp16", "fp32", 1),
    ("zero=3,dp=2", "bf16", 1),
    ("zero=3,dp=4,hpz=2", "fp32", 1),
    ("zero=3,dp=4,hpz=2,qw=1,qg=1", "bf16", 1),
    ("zero=1,offload=cpu", "bf16", None),
    ("zero=3,dp=2,offload=cpu,offload_param=cpu", "fp32", None),
    ("zero=3,offload=nvme,offload_param=nvme,nvme=.,sub_group=4096", "bf16", None),
    ("pp=2", "fp32", 1),
    ("pp=2,schedule=zb-h1,dp=2,zero=3,pin=on", "fp32", 1),
    ("tp=2,sp=1", "fp32", 1),
    ("cp=3", "bf16", 1),
    ("cp=2,comm_type=all_gather", "fp32", 1, WINDOW),
    ("cp=2,comm_type=a2a", "fp32", 1, DOCUMENTS),
    ("cp=2", "fp32", 1, (*WINDOW, *DOCUMENTS)),
    ("cp=2,comm_type=all_gather", "bf16", 1, DOCUMENTS),
    ("cp=2", "fp32", 1, ALIBI),
    ("cp=4,comm_type=a2a+p2p,hcp=2 2", "bf16", 1, DOCUMENTS),
    ("cp=2,tp=2,sp=1", "fp32", 1, WINDOW),
    ("tp=2,sp=1,tiles=3", "bf16", 1),
    ("zero=2,dp=2,tp=2", "fp32", 1, MUON),
]
NAMES = ["-".join((layout, dtype, *sum(more, ()))) for layout, dtype, _, *more in CASES]
# Further features: (layout, dtype, flags).
FEATURES = {
    "onebit adam": ("dp=2", "fp32", "--optimizer onebit_adam --freeze-step 1"),
    "lamb": ("zero=1,dp=2", "fp32", "--optimizer lamb"),
    "lion": ("zero=2,dp=2", "fp32", "--optimizer lion"),
    "adagrad": ("zero=1,dp=2", "fp32", "--optimizer adagrad"),
    "sgd": ("zero=3,dp=2", "fp32", "--optimizer sgd"),
    "zeros": ("zero=1,dp=2", "fp32", "--log-num-zeros-in-grad"),
    "dropout": ("tp=2,sp=1", "fp32", DROPOUT),
    "selective": ("tp=2,recompute=selective", "fp32", ""),
    "full": ("dp=2,zero=3,recompute=full", "bf16", ""),
    "norms of heads": ("tp=2", "fp32", "--qk-layernorm"),
    "rope": ("tp=2,sp=1", "bf16", "--position-embedding-type rope"),
    "loss of tokens": ("dp=2,zero=2", "fp32", "--calculate-per-token-loss"),
    "chunks of logits": ("tp=2,logits=3", "bf16", ""),
    "smoothing": ("tp=2", "fp32", "--label-smoothing 0.1"),
    "untied": ("pp=2,zero=1", "fp32", "--untie-embeddings-and-output-weights"),
    "interleaved": ("pp=2,chunks=2,schedule=interleaved", "fp32", "--num-layers 4"),
    "adapters": ("dp=2,zero=2", "bf16", "--lora-rank 4"),
    # One rank: ranks as threads would share tables of decoded numbers, without an order among their streams.
    "encoded base": ("dp=1", "bf16", "--lora-rank 4 --lora-base-bits 4"),
    "zb-v": ("pp=2,chunks=2,schedule=zb-v", "fp32", "--num-layers 4"),
}
EXPERTS = {
    "padded": (
        "dp=2,zero=2",
        "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    ),
    "capacity": ("dp=2,ep=2,zero=1", "--moe-expert-capacity-factor 1.0"),
    "bias": (
        "dp=2,zero=1",
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    ),
    "shared": ("dp=2,ep=2,zero=3", "--moe-shared-expert-intermediate-size 32"),
    "tensor parallel": ("tp=2,sp=1,zero=1", ""),
    "expert data": ("dp=4,ep=2,zero=2", ""),
}


@pytest.mark.parametrize(
    "layout, dtype, waits, more", [(*case, ())[:4] for case in CASES], ids=NAMES
)
def test_a_step_on_a_gpu_is_ordered_waits_once_and_trains_like_the_cpu(
    layout, dtype, waits, more
):
    more = (*few_of(layout), *more)
    on_gpu = train(layout, "cuda", dtype, more)
    check_like_the_cpu(on_gpu, layout, dtype, more)
    if waits is not None:
        check_waits(on_gpu, waits * STEPS)
        assert all(THE_WAIT in place for of in on_gpu.waits() for place in of)


def few_of(layout: str) -> tuple[str, ...]:
    """Flags of a smaller run: not where ranks divide four samples or the layers, nor where sums of fp16 round,
    which is more of a smaller sum."""
    large = ("dp=4", "pp=", "comm=fp16")
    return () if any(part in layout for part in large) else FEW


def test_weights_in_host_memory_are_written_with_one_wait():
    layout = "zero=3,dp=2,offload_param=cpu"
    on_gpu = train(layout, "cuda", "bf16")
    check_like_the_cpu(on_gpu, layout, "bf16", ())
    for of_rank in on_gpu.waits():
        at_start = sum(n for at, n in of_rank.items() if "parameter_set.py" in at)
        assert of_rank.total() - at_start == 2 * STEPS, of_rank


def check_like_the_cpu(on_gpu: Run, layout: str, dtype: str, more) -> None:
    """Ordered, also where all streams of a rank share one hardware queue, and the numbers of a CPU."""
    assert not on_gpu.problems
    assert not blocked_queues(on_gpu.orders)
    on_cpu = train(layout, "cpu", dtype, more)
    found = difference(on_gpu.merged, on_cpu.merged, on_cpu.model)
    limit = TOLERANCE[dtype]
    assert found.loss <= limit.loss and found.grad_norm <= limit.grad_norm, found


def check_waits(run: Run, expected: int) -> None:
    for of_rank in run.waits():
        assert of_rank.total() == expected, of_rank


@pytest.mark.parametrize("layout, dtype, flags", FEATURES.values(), ids=FEATURES)
def test_each_feature_runs_ordered_with_one_wait_and_trains_like_the_cpu(
    layout, dtype, flags
):
    more = (*FEW, *flags.split())
    on_gpu = train(layout, "cuda", dtype, more)
    check_like_the_cpu(on_gpu, layout, dtype, more)
    check_waits(on_gpu, STEPS)


@pytest.mark.parametrize("layout, flags", EXPERTS.values(), ids=EXPERTS)
def test_each_feature_of_experts_runs_ordered_and_trains_like_the_cpu(layout, flags):
    """The host waits for the numbers of rows, unless their places are fixed."""
    layers = 2
    more = (*MOE, "--num-layers", str(layers), *flags.split())
    on_gpu = train(layout, "cuda", more=more)
    check_like_the_cpu(on_gpu, layout, "fp32", more)
    data = parse_layout(layout).world_size if "dp" in layout else 1
    dispatches = 0 if "--moe-pad-expert-input-to-capacity" in more else layers * BATCH
    check_waits(on_gpu, STEPS * (1 + dispatches // data))


@pytest.mark.parametrize("schedule, p", [("1f1b", 2), ("gpipe", 2), ("zb-h1", 3)])
def test_a_rank_holds_the_planned_sends_when_its_host_is_a_step_ahead(
    schedule, p, monkeypatch
):
    """No send is known to be complete before it is waited for."""
    held = Counter()
    send = Channels.send

    def counted_send(channels, *arguments):
        send(channels, *arguments)
        messages = (tensor for of in channels._sent.values() for tensor, _ in of)
        sent = sum(tensor.is_floating_point() for tensor in messages)
        held[channels.group.rank] = max(held[channels.group.rank], sent)

    monkeypatch.setattr(Channels, "send", counted_send)
    assert not train(f"pp={p},schedule={schedule}", "cuda").problems
    lowered = lower(SCHEDULES[schedule](p, BATCH), p)
    assert tuple(held[rank] for rank in range(p)) == simulate(lowered).peak_sends


@pytest.mark.parametrize(
    "at, place", [(Op.F, "F1@"), (Op.REDUCE, "REDUCE@"), (None, "")]
)
def test_a_device_that_waits_for_another_rank_is_found_in_the_pipeline(
    at, place, monkeypatch
):
    """From an instruction on, or from the end of a step, nothing that is launched ends."""
    run_steps, queue = Executor._run_steps, StepMetrics.queue

    def stop(executor, steps):
        def handle(handler, i):
            gpu().is_stuck |= i.op is at and i.microbatch in (None, 1)
            handler(i)

        run_steps(executor, [(partial(handle, handler), i) for handler, i in steps])

    def stop_behind(metrics, *arguments):
        gpu().is_stuck |= at is None
        return queue(metrics, *arguments)

    monkeypatch.setattr(Executor, "_run_steps", stop)
    monkeypatch.setattr(StepMetrics, "queue", stop_behind)
    monkeypatch.setattr(device_wait, "patience", lambda timeout: 0.01)
    with pytest.raises(CommunicationError) as caught:
        train("pp=2", "cuda")
    message = str(caught.value)
    assert (
        "waiting for the device" in message and "the device of pipeline rank" in message
    )
    if at is None:
        assert "is behind them" in message
    else:
        assert f" instructions and is at {place}" in message, message


def test_the_place_of_the_device_is_written_with_its_moment_in_the_schedule(
    tmp_path, monkeypatch
):
    """For the launcher, by a thread, while the host waits: the device of the last stage does not go on."""
    writer = PlaceWriter(tmp_path / "places", {})
    monkeypatch.setattr(places, "_writer", [writer])
    monkeypatch.setattr(device_place, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(device_wait, "patience", lambda timeout: 1.0)
    entries, write = [], PlaceWriter.device

    def recorded(self, entry):
        write(self, entry)
        entries.append(read_places(tmp_path / "places").device)

    monkeypatch.setattr(PlaceWriter, "device", recorded)
    run_steps = Executor._run_steps

    def stop(executor, steps):
        def handle(handler, i):
            gpu().is_stuck |= str(i) == "F2@1"
            handler(i)

        run_steps(executor, [(partial(handle, handler), i) for handler, i in steps])

    monkeypatch.setattr(Executor, "_run_steps", stop)
    with pytest.raises(CommunicationError, match="waiting for the device"):
        train("pp=2,schedule=1f1b", "cuda")
    schedule = lower(SCHEDULES["1f1b"](2, BATCH), 2, tied=(0, 1))
    at = schedule[1].index(Instruction(Op.F, 1, 2))
    found = [entry for entry in entries if entry.done == at and entry.instruction]
    assert any(
        (entry.instruction, entry.stage, entry.microbatch) == ("F", 1, 2)
        and entry.moment == simulate(schedule).starts[1][at]
        for entry in found
    )


@pytest.mark.parametrize("layout", ["cp=2", "cp=2,tp=2,comm_type=all_gather"])
def test_documents_save_the_same_tiles_on_a_gpu_as_on_a_cpu(layout, monkeypatch):
    """Their boundaries are known on the host, without a wait, and on ranks that do not read data."""
    monkeypatch.setattr(attention_tiles, "LIMITS", TileLimits(rows=3))
    found, tiles = {"cuda": set(), "cpu": set()}, partial_attention.tiles
    for device, of_device in found.items():

        def recorded(visible, *arguments, of_device=of_device):
            made = [*tiles(visible, *arguments)]
            of_device.update(
                (visible.boundaries, tile.queries, tile.keys, tile.is_whole)
                for tile in made
            )
            return iter(made)

        monkeypatch.setattr(partial_attention, "tiles", recorded)
        assert not train(layout, device, more=(*FEW, *DOCUMENTS)).problems
    assert found["cuda"] == found["cpu"]
    assert any(boundaries[0] for boundaries, *_ in found["cuda"])


def test_a_layer_with_experts_adds_one_wait_for_each_dispatch():
    run = train("dp=2,zero=2", "cuda", more=(*MOE, "--expert-model-parallel-size", "2"))
    assert not run.problems
    dispatches = STEPS * LAYERS * BATCH // 2
    for of_rank in run.waits():
        assert of_rank.total() == STEPS + dispatches, of_rank


def arrive_only(work):
    """`FakeWork.wait` without the wait of the stream."""
    work._arrive()
    work._arrive, work.tensors = lambda: None, ()


def exchange_without_order(*arguments, **options):
    """`exchange` whose messages arrive, for which no stream waits."""
    work = exchange(*arguments, **options)
    return SimpleNamespace(wait=lambda: arrive_only(work))


exchange = block_exchange.exchange
FAULTS = {
    "blocks of a ring": (block_exchange, "exchange", exchange_without_order),
    "collectives and messages": (FakeWork, "wait", arrive_only),
    "marks": (Mark, "wait", lambda mark: None),
    "side streams": (SideStream, "behind_current", SideStream.apart),
    "weights": (Arrivals, "wait", lambda arrivals, layer: None),
    "the host": (tiers, "wait_for_mark", lambda mark: None),
}
# Not every wait is needed in every layout: the next collective of a group may order a stream as well.
FAULTY = [
    ("collectives and messages", "zero=1,dp=2", "bf16"),
    ("collectives and messages", "pp=2", "fp32"),
    ("collectives and messages", "zero=2,dp=2,comm=fp16", "fp32"),
    ("collectives and messages", "zero=3,dp=2", "fp32"),
    ("marks", "zero=2,dp=2,comm=fp16", "fp32"),
    ("marks", "zero=1,dp=2,pp=2", "fp32"),
    ("marks", "zero=3,offload_param=cpu", "bf16"),
    ("side streams", "zero=1,dp=2", "fp32"),
    ("side streams", "zero=3,dp=2,offload_param=cpu", "bf16"),
    ("weights", "zero=1,dp=2", "bf16"),
    ("weights", "zero=2,dp=2,pp=2", "fp32"),
    ("the host", "zero=1,offload=cpu", "bf16"),
    ("blocks of a ring", "cp=3", "fp32"),
    ("collectives and messages", "cp=2,comm_type=all_gather", "fp32"),
]


@pytest.mark.parametrize("fault, layout, dtype", FAULTY)
def test_a_wait_that_is_left_out_is_found(fault, layout, dtype):
    few = FEW if layout.startswith("cp") else ()
    with patch.object(*FAULTS[fault]):
        assert train(layout, "cuda", dtype, few).problems


class Unnoticed(dict):
    """The posted receives of `Channels`, of which it notices none: it then waits for none of them."""

    def __contains__(self, channel):
        return False

    def __delitem__(self, channel):
        pass


def test_receives_that_are_posted_early_block_a_single_hardware_queue(monkeypatch):
    """No stream lacks an event and the numbers are right: only the queue shows it."""
    make = Channels.__init__

    def unnoticing(channels, group):
        make(channels, group)
        channels._posted = Unnoticed()

    monkeypatch.setattr(Channels, "__init__", unnoticing)
    at_once = lambda messages, program, starts: [(0.0, passes.FIRST)] * len(messages)
    monkeypatch.setattr(passes, "_posts", at_once)
    monkeypatch.setattr(simulation, "check_one_queue", lambda schedule: None)
    run = train("pp=2,schedule=gpipe", "cuda")
    assert not run.problems
    assert len(blocked_queues(run.orders)) == 2


@pytest.mark.parametrize(
    "layout",
    [
        "zero=0,dp=2",
        "zero=2,dp=2,comm=fp16",
        "zero=3,dp=2",
        "zero=3,offload=cpu,offload_param=cpu",
    ],
)
def test_reductions_gathers_and_copies_run_beside_the_model(layout):
    """Casts and additions of reductions, gathers and copies are not on the stream of the model."""
    [order, *_] = train(layout, "cuda").orders
    kinds = {what for stream, what in order.launches if stream != DEFAULT}
    wanted = {
        "zero=0,dp=2": {"all-reduce"},
        "zero=2,dp=2,comm=fp16": {"reduce-scatter", "aten.add_"},
        "zero=3,dp=2": {"all-gather", "reduce-scatter"},
        "zero=3,offload=cpu,offload_param=cpu": {"copy"},
    }
    assert kinds >= wanted[layout], kinds


@pytest.mark.parametrize(
    "layout", ["zero=1,dp=2,bucket=4096", "zero=2,dp=2,pp=2,bucket=4096"]
)
def test_the_first_layers_begin_while_weights_of_the_last_are_gathered(layout):
    """Between the waits for gathers of weights there are products, and no gather begins: all have begun."""
    wait = FakeWork.wait

    def recorded(work):
        if "param_store.py" in place():
            gpu().order.launches.append((DEFAULT, "wait for weights"))
        wait(work)

    with patch.object(FakeWork, "wait", recorded):
        run = train(layout, "cuda")
    assert not run.problems
    for order in run.orders:
        names = [what for _, what in order.launches]
        second_step = names[names.index("wait for weights") :]
        second_step = second_step[: second_step.index("all-gather")]
        last = len(second_step) - second_step[::-1].index("wait for weights")
        assert "aten.addmm" in second_step[:last], second_step[:last]


def free_gathers(order) -> list:
    """Gathers of weights that begin before the reduction that was launched before them has ended."""
    found, reduction = [], None
    for entry in order.queue:
        if entry.what == "reduce-scatter":
            reduction = entry
        elif entry.what == "all-gather" and reduction is not None:
            if entry.before.get(reduction.stream, 0) < reduction.time:
                found.append(entry)
    return found


def test_gathers_of_a_backward_do_not_stand_behind_its_reductions(monkeypatch):
    """They have a communicator of their own: with that of the reductions all of them would."""
    run = train("zero=3,dp=2", "cuda", "bf16")
    assert not run.problems and not blocked_queues(run.orders)
    assert all(free_gathers(order) for order in run.orders)
    monkeypatch.setattr(DataGroups, "gathering_apart", lambda groups, connect: groups)
    assert not any(map(free_gathers, train("zero=3,dp=2", "cuda", "bf16").orders))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_of_experts_are_reduced_while_the_backward_goes_on(zero):
    more = (*MOE, "--expert-model-parallel-size", "2", "--reduce-bucket-size", "4096")
    for order in train(f"dp=4,zero={zero}", "cuda", more=more).orders:
        of_experts = [entry.stream == "nccl edp" for entry in order.queue]
        first = of_experts.index(True)
        until_the_host_waits = [
            entry.what
            for entry in takewhile(lambda e: e.stream != HOST, order.queue[first:])
        ]
        assert until_the_host_waits.count("aten.mm") > LAYERS, until_the_host_waits


def test_short_kernels_beside_a_product_have_a_high_priority():
    with fake_cuda(), FakeGpu():
        kinds = ("reductions", "gathers", "to host", "to device")
        streams = [side_stream(CUDA, kind)._stream.priority for kind in kinds]
    assert streams == [-1, -1, 0, 0]
