"""A backward in two halves is the whole backward to the last bit, and keeps in between what the weight half
needs."""

import dataclasses
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ds.models import MODELS, build_stage, gpt_loss
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.managed_parameter import accumulator_of
from megatron_ds.pipeline.schedules import SCHEDULES, ScheduleFamily
from megatron_ds.pipeline.stage import LayerHooks, Stage
from megatron_ds.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.tensor_parallel.vocabulary import (
    VocabParallelEmbedding,
    parallel_logits,
    vocabulary_spec,
)
from tests.harness.gpt_runs import make_batch
from tests.harness.gradients import accumulated, install
from tests.harness.layout_runs import GLOBAL_BATCH, NUM_LAYERS, run_layout
from tests.harness.model_runs import context_of
from tests.harness.pipelines import make_batches, split_backwards
from tests.harness.plain_gpt import STYLES, load_logical, logical_weights
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.parts(3)]

S, B, H, WIDE, VOCABULARY = 6, 2, 8, 12, 20
ORDERS = (
    "IWIWIW",
    "IIWIWW",
    "IIIWWW",
)  # the next I, or the next W, in the order of the micro-batches
[BATCH] = make_batches(1)  # for layers that read none


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def move_to_main_grad(p):
    if p.grad is not None:
        accumulator_of(p).add(p.grad)
        p.grad = None


def install_main_grad(p, announce):
    """What ZeRO does to a parameter."""
    install(p, torch.zeros(p.shape), announce)
    p.register_post_accumulate_grad_hook(move_to_main_grad)


def install_main_grads(parameters):
    """Returns the log of announcements."""
    announced = []
    for number, p in enumerate(parameters):
        install_main_grad(p, lambda number=number: announced.append(number))
    return announced


def gradients_of(stage):
    """A copy of what has been accumulated, wherever that is."""
    parameters = [p for module in stage.modules for p in module.parameters()]
    return [
        None if (grad := accumulated(p)) is None else grad.clone() for p in parameters
    ]


def same(ones, others):
    return all(
        a is b is None or torch.equal(a, b) for a, b in zip(ones, others, strict=True)
    )


def run_whole(stage, inputs, grads, forward):
    """(input gradients, the parameters' gradients after each backward)."""
    for k, x in enumerate(inputs):
        forward(stage, k, x)
    results = [
        (stage.backward(k, grad), gradients_of(stage)) for k, grad in enumerate(grads)
    ]
    return [dx for dx, _ in results], [after for _, after in results]


def run_halves(stage, inputs, grads, forward, order):
    """The same in halves; looks that no input half leaves a gradient, and that each weight half delivers its
    own."""
    for k, x in enumerate(inputs):
        forward(stage, k, x)
    input_grads, after = [], []
    for half in order:
        before = gradients_of(stage)
        if half == "I":
            input_grads.append(
                stage.backward_input(len(input_grads), grads[len(input_grads)])
            )
            assert same(before, gradients_of(stage))
        else:
            stage.backward_weights(len(after))
            after.append(gradients_of(stage))
    stage.check_empty()
    return input_grads, after


def compare(
    make_stage,
    inputs,
    grads,
    forward=lambda stage, k, x: stage.forward(k, BATCH, x, 1.0),
    orders=ORDERS,
):
    """make_stage() → (stage, log of announcements). All orders of halves against the whole backward."""
    stage, announced = make_stage()
    input_grads, after = run_whole(stage, inputs, grads, forward)
    assert not same(after[0], after[1]), "a test of nothing"
    for order in orders:
        stage, log = make_stage()
        halves_input_grads, halves_after = run_halves(
            stage, inputs, grads, forward, order
        )
        assert same(input_grads, halves_input_grads)
        assert all(map(same, after, halves_after))
        assert sorted(log) == sorted(announced)


class Layer(nn.Module):
    """One kind of layer, and how it is called."""

    def __init__(self, inner, call=None):
        super().__init__()
        self.inner, self.call = inner, call or (lambda inner, x: inner(x))

    def forward(self, x, batch):
        return self.call(self.inner, x)


def column(group, sequence_parallel, **options):
    return Layer(
        ColumnParallelLinear(
            H,
            WIDE,
            context_of(group, sequence_parallel=sequence_parallel),
            name="c",
            init_std=1,
            **options,
        )
    )


def row(group, sequence_parallel):
    return Layer(
        RowParallelLinear(
            WIDE,
            H,
            context_of(group, sequence_parallel=sequence_parallel),
            name="r",
            init_std=1,
        )
    )


def head(group, sequence_parallel):
    embedding = VocabParallelEmbedding(
        vocabulary_spec("e.weight", VOCABULARY, H, 1), context_of(group)
    )
    return Layer(
        embedding, lambda e, x: parallel_logits(x, e.weight, group, sequence_parallel)
    )


def embedding(group, sequence_parallel):
    table = VocabParallelEmbedding(
        vocabulary_spec("e.weight", VOCABULARY, H, 1),
        context_of(group, sequence_parallel=sequence_parallel),
    )
    return Layer(
        table, lambda e, x: e(torch.arange(S * B).view(B, S).square() % VOCABULARY)
    )


KINDS = {
    "column": (column, H, WIDE),
    "row": (row, WIDE, H),
    "head": (head, H, VOCABULARY),
    "embedding": (embedding, None, H),
    "gathering column": (lambda *a: column(*a, gather_output=True), H, WIDE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("t, sequence_parallel", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_layer_has_the_gradients_of_a_whole_backward(
    kind, t, sequence_parallel, main_grad, dtype
):
    make, size_in, size_out = KINDS[kind]

    def main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)

        def make_stage():
            module = make(group, sequence_parallel).to(dtype)
            for seed, p in enumerate(module.parameters()):
                p.data.copy_(randn(*p.shape, seed=10 * rank + seed))
            log = install_main_grads(module.parameters()) if main_grad else []
            return Stage(1, [module], is_first=size_in is None, is_last=False), log

        split = lambda size, by_sequence, by_channel: (
            S // t if by_sequence and sequence_parallel else S,
            B,
            size // t if by_channel else size,
        )
        shape_in = (
            None if size_in is None else split(size_in, kind != "row", kind == "row")
        )
        shape_out = split(
            size_out, kind in ("row", "embedding"), kind in ("column", "head")
        )
        same_on_all = lambda by_rank: rank if by_rank or sequence_parallel else 0
        inputs = [
            None
            if shape_in is None
            else randn(*shape_in, seed=7 * k + same_on_all(kind == "row"), dtype=dtype)
            for k in range(3)
        ]
        grads = [
            randn(
                *shape_out,
                seed=90 + 7 * k + same_on_all(kind in ("column", "head")),
                dtype=dtype,
            )
            for k in range(3)
        ]
        compare(make_stage, inputs, grads)

    run_ranks(t, main)


def freeze(modules, names):
    for module in modules:
        for p in module.parameters():
            if any(name in p.spec.name for name in names):
                p.requires_grad_(False)


FROZEN = {
    "nothing frozen": (),
    "embedding frozen": ("word_embeddings",),
    "first block frozen": ("embedding", "layers.0"),
    "biases frozen": ("bias",),
    "weights frozen": ("linear", "norm.weight"),
    "all frozen but norms": ("linear", "embedding"),
}


@pytest.mark.parametrize(
    "part, style, t, sequence_parallel, recompute, frozen, dtype, main_grad",
    [
        ("whole", "gpt2", 1, False, None, "nothing frozen", "fp32", True),
        ("whole", "gpt2", 1, False, None, "nothing frozen", "fp32", False),
        ("first", "gpt2", 2, True, "full", "nothing frozen", "bf16", True),
        ("whole", "llama", 2, True, "selective", "nothing frozen", "fp32", True),
        ("middle", "llama", 1, False, "full", "biases frozen", "bf16", False),
        ("last", "gpt2", 2, False, "selective", "nothing frozen", "bf16", True),
        ("whole", "gpt2", 1, False, "full", "embedding frozen", "fp32", True),
        ("first", "llama", 2, True, None, "first block frozen", "bf16", True),
        ("middle", "gpt2", 2, True, None, "weights frozen", "fp32", True),
        ("last", "gpt2", 1, False, None, "all frozen but norms", "fp32", True),
        ("first", "gpt2", 1, False, "selective", "biases frozen", "fp32", False),
    ],
)
def test_a_model_has_the_gradients_of_a_whole_backward(
    part, style, t, sequence_parallel, recompute, frozen, dtype, main_grad
):
    config = dataclasses.replace(
        STYLES[style], hidden_dropout=0.1, attention_dropout=0.1
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    batches = [make_batch(config, seed=seed) for seed in range(3)]
    first, last = part in ("whole", "first"), part in ("whole", "last")

    def main(rank, world):
        tp = world.group("tp", tuple(range(t)), rank)

        def make_stage():
            layers = MODELS["gpt"](
                config,
                context_of(
                    tp,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype,
                    recompute_granularity=recompute,
                ),
            )
            modules = build_stage(
                {
                    "whole": layers,
                    "first": layers[:2],
                    "middle": layers[1:4],
                    "last": layers[3:],
                }[part]
            )
            load_logical(modules.parameters(), logical_weights(config, seed=1), tp)
            freeze(modules, FROZEN[frozen])
            log = (
                install_main_grads(p for p in modules.parameters() if p.requires_grad)
                if main_grad
                else []
            )
            loss = lambda x, batch: gpt_loss(
                x, batch, tp=tp, vocab_size=config.vocab_size
            )
            return Stage(
                0,
                list(modules),
                is_first=first,
                is_last=last,
                loss=loss if last else None,
            ), log

        shape = (10 // t if sequence_parallel else 10, 3, config.hidden_size)
        x = lambda k: randn(
            *shape, seed=40 + k + (rank if sequence_parallel else 0), dtype=dtype
        )
        forward = lambda stage, k, x: stage.forward(k, batches[k], x, 0.7)
        inputs, grads = (
            [None if first else x(k) for k in range(3)],
            [None if last else x(k + 20) for k in range(3)],
        )
        stage, _ = make_stage()
        if first and not any(
            p.requires_grad for module in stage.modules for p in module.parameters()
        ):
            assert run_halves(stage, inputs, grads, forward, "IIWIWW")[0] == [None] * 3
            return
        compare(make_stage, inputs, grads, forward, ORDERS[1:2])

    run_ranks(t, main)


def test_gradients_are_announced_layer_by_layer_from_the_last_to_the_first_and_then_the_layer_is_complete():
    config, log = STYLES["gpt2"], []
    modules = build_stage(MODELS["gpt"](config, context_of()))
    for layer, module in enumerate(modules):
        for p in module.parameters():
            install_main_grad(p, lambda layer=layer: log.append(layer))
    # Embedding and head share it.
    tied = modules[0].weight
    install(tied, torch.zeros(tied.shape), lambda: log.append("tied"))
    hooks = LayerHooks(complete=lambda layer: log.append(f"complete {layer}"))
    stage = Stage(
        0,
        list(modules),
        is_first=True,
        is_last=True,
        hooks=hooks,
        loss=lambda x, batch: gpt_loss(
            x, batch, tp=solo("tp"), vocab_size=config.vocab_size
        ),
    )
    stage.forward(0, make_batch(config), None, 1.0)
    stage.backward_input(0, None)
    assert not log
    stage.backward_weights(0)
    completions = [entry for entry in log if isinstance(entry, str) and entry != "tied"]
    assert completions == [f"complete {layer}" for layer in (5, 4, 3, 2, 1, 0)]
    assert log[0] == "tied" and "tied" in log[-3:]
    open_layer = 5
    for entry in log:
        if entry == f"complete {open_layer}":
            open_layer -= 1
        else:
            assert entry in (open_layer, "tied")
    assert [log.count(layer) for layer in range(6)] == [1, 12, 12, 12, 2, 0]


class Allocations(TorchDispatchMode):
    """Bytes of the tensors made while it is on that are still there."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.note((args, kwargs), made=False)
        result = function(*args, **(kwargs or {}))
        self.note(result, made=True)
        return result

    def note(self, tree, made):
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self.storages.get(storage._cdata)
                if known is None or known[0]() is None:  # an address may be used again
                    self.storages[storage._cdata] = (
                        weakref.ref(storage),
                        storage.nbytes() * made,
                    )

    @property
    def alive(self) -> int:
        return sum(
            nbytes
            for storage, nbytes in self.storages.values()
            if storage() is not None
        )


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_between_the_halves_remain_the_factors_of_the_deferred_gradients_and_small_sums(
    recompute,
):
    config = dataclasses.replace(
        STYLES["gpt2"], hidden_size=32, ffn_size=96, head_dim=8, num_layers=2
    )
    s, b, h, f = 64, 2, 32, 96
    modules = build_stage(
        MODELS["gpt"](config, context_of(recompute_granularity=recompute))[1:3]
    )
    for p in modules.parameters():
        nn.init.normal_(p, std=0.1)
    install_main_grads(modules.parameters())
    stage, allocations = (
        Stage(1, list(modules), is_first=False, is_last=False),
        Allocations(),
    )
    batch, x, grad = (
        make_batch(config, b=b, s=s),
        randn(s, b, h, seed=1),
        randn(s, b, h, seed=2),
    )
    with allocations:
        stage.forward(0, batch, x, 1.0)
        dx = stage.backward_input(0, grad)
        between = allocations.alive
        stage.backward_weights(0)
        after = allocations.alive
    linears = (h + 3 * h) + (h + h) + (h + f) + (f + h)  # x and dy of each
    factors = 4 * s * b * (2 * linears - h)  # the last dy is `grad`
    sums = 4 * sum(p.numel() for p in modules.parameters() if p.dim() == 1)
    assert after == dx.nbytes
    assert factors < between - dx.nbytes <= factors + sums


def test_the_factors_are_freed_one_by_one_in_the_weight_half():
    modules = [
        Layer(ColumnParallelLinear(H, H, context_of(), name=str(n), init_std=1))
        for n in range(4)
    ]
    for p in (p for module in modules for p in module.parameters()):
        nn.init.normal_(p)
    install_main_grads(p for module in modules for p in module.parameters())
    alive, allocations = [], Allocations()
    hooks = LayerHooks(complete=lambda layer: alive.append(allocations.alive))
    stage = Stage(1, modules, is_first=False, is_last=False, hooks=hooks)
    with allocations:
        stage.forward(0, BATCH, randn(S, B, H, seed=1), 1.0)
        stage.backward_input(0, randn(S, B, H, seed=2))
        stage.backward_weights(0)
    assert alive == sorted(alive, reverse=True) and len(set(alive)) == 4


@pytest.fixture
def split_schedules(monkeypatch):
    """1F1B in halves, as schedules of their own."""
    for delay in (0, 2):
        make = lambda p, m, chunks, delay=delay: split_backwards(
            SCHEDULES["1f1b"](p, m, chunks), delay
        )
        name = f"1f1b-split-{delay}"
        monkeypatch.setitem(SCHEDULES._things, name, ScheduleFamily(name, make))


@pytest.mark.parametrize(
    "style, layout",
    [
        ("gpt2", "pp=2,dp=2,zero=0"),
        ("llama", "pp=2,dp=2,zero=1,bucket=1000"),
        ("gpt2", "pp=2,dp=2,zero=2,bucket=1000"),
        ("llama", "pp=2,dp=2,zero=2,accumulate=full"),
        ("gpt2", "pp=2,dp=2,zero=3"),
        ("gpt2", "pp=1,dp=2,zero=3,recompute=full"),
        ("llama", "pp=2,dp=2,zero=3,pin=1"),
        ("gpt2", "tp=2,sp=1,pp=2,dp=2,zero=3,accumulate=full"),
        ("llama", "tp=2,sp=1,pp=2,zero=1,recompute=selective"),
    ],
)
def test_training_in_halves_ends_with_the_very_weights_of_whole_backwards(
    split_schedules, style, layout
):
    job = tiny_job(
        style,
        "bf16" if "tp=2" in layout else "fp32",
        False,
        0.1,
        NUM_LAYERS,
        GLOBAL_BATCH,
        3,
    )
    losses, weights = read(run_layout(job, f"{layout},schedule=1f1b", 3))
    for delay in (0, 2):
        halves_losses, halves_weights = read(
            run_layout(job, f"{layout},schedule=1f1b-split-{delay}", 3)
        )
        assert halves_losses == losses
        assert all(torch.equal(weights[name], halves_weights[name]) for name in weights)


def read(run):
    trace, weights = run.merged
    return trace.losses, weights
