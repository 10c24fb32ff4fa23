"""What a stage is planned to keep for backward, against what real layers on a CPU do keep: storages that are
alive, to the byte; and against closed forms (`tests/harness/activation_formulas.py`).

One process simulates its tensor-parallel peers: kernels and shapes are those of a real rank, values are not.
"""

from dataclasses import replace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.models import MODELS, build_stage
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops import widened_products
from megatron_ds.ops.widened_products import WORKSPACE
from megatron_ds.pipeline.stage import Stage
from megatron_ds.planning.fake_stages import StageRunner, without_memory
from megatron_ds.planning.run_model import (
    DTYPES,
    boundary_shape,
    describe_layers,
    loss_function,
    parallel_context,
)
from megatron_ds.planning.run_plan import PipelineShape, plan_run
from megatron_ds.training.build import build_replica
from tests.harness import activation_formulas
from tests.harness.activation_formulas import (
    Workload,
    kept_by_layer,
    kept_by_stage,
    workspace_bytes,
)
from tests.harness.alive_bytes import AliveBytes
from tests.harness.covering import cover_pairs

pytestmark = [pytest.mark.plan, pytest.mark.one_in(6)]

JOB = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --vocab-size 130 --lr 1 "
    "--train-iters 1 --mock-data --make-vocab-size-divisible-by 8"
).split()
STYLES = {
    "gpt": [],
    "gqa": ["--num-query-groups", "2"],
    "rope": ["--position-embedding-type", "rope"],
    "llama": (
        "--position-embedding-type rope --num-query-groups 2 --swiglu --normalization RMSNorm "
        "--disable-bias-linear"
    ).split(),
    "bert": ["--model", "bert"],
    "single": ["--model", "bert", "--bert-no-binary-head"],
}
RANKS = {
    "alone": (1, []),
    "tp": (2, ["--tensor-model-parallel-size", "2"]),
    "sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
}
RECOMPUTE = {
    "kept": [],
    "selective": ["--recompute-granularity", "selective"],
    "full": ["--recompute-granularity", "full"],
    "some": ["--recompute-granularity", "full", "--recompute-num-layers", "1"],
}


def kept(
    job: list[str], ranks: int, layers: slice, apart: bool = False
) -> tuple[int, int, int]:
    """(measured, by the closed form, planned) bytes of a micro-batch on a stage of these layers, on a CPU."""
    config = parse(
        [*JOB, *job, *(["--reset-attention-mask"] if apart else [])], world_size=ranks
    )
    model, train, mesh = (
        config.model,
        config.train,
        fake_mesh(config.grid(), ranks - 1, "cpu"),
    )
    part = parallel_context(config, mesh).slice
    model_layers = describe_layers(config, mesh)
    stage_layers = model_layers[layers]
    modules = build_stage(stage_layers)
    for parameter in modules.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    last, s, b = (
        layers.stop == len(model_layers),
        model.seq_length,
        train.micro_batch_size,
    )
    stage = Stage(
        0,
        list(modules),
        is_first=layers.start == 0,
        is_last=last,
        loss=loss_function(config, mesh) if last else None,
    )
    batches, losses = [], []
    with AliveBytes() as alive:
        # the second: what a rank holds once, such as the rotary tables used last, is there already
        for k in range(2):
            batch = MODELS[model.model].data.blank(b, s).keeping(config.kept_tokens, 0)
            if apart:
                batch = replace(batch, document_ids=torch.arange(s).expand(b, -1) // 9)
            batches.append(batch.cut(part))
            given = alive.now()
            x = (
                None
                if stage.is_first
                else torch.zeros(
                    boundary_shape(config), dtype=DTYPES[config.optimizer.params_dtype]
                )
            )
            output = stage.forward(k, batches[-1], x, 1.0)
            losses += [output] if last else []
            del x, output
            measured = alive.now() - given
    return (
        measured,
        by_formula(config, stage_layers, "cpu", apart),
        planned(config, mesh, layers, "cpu"),
    )


def workload(config, device: str, apart: bool = False) -> Workload:
    model, p, drop = config.model, config.parallel, config.kept_tokens
    tp = p.tensor_model_parallel_size
    length = model.seq_length // p.context_parallel_size
    return Workload(
        model,
        config.train.micro_batch_size,
        length,
        tp,
        p.sequence_parallel,
        DTYPES[config.optimizer.params_dtype],
        model.padded_vocab_size(tp) // tp,
        device,
        apart,
        drop and drop.kept_at(0, model.seq_length),
        config.train.cross_entropy_chunks == 1,
    )


def by_formula(config, layers, device: str, apart: bool = False) -> int:
    return kept_by_stage(
        workload(config, device, apart),
        [layer.sort for layer in layers],
        config.train.recompute_granularity,
        config.train.recompute_num_layers,
    )


def planned(config, mesh: Mesh, layers: slice, device: str) -> int:
    """What the planner finds for a stage of these layers by running it without memory."""
    plan = plan_run(config, describe_layers(config, mesh))
    bounds = tuple(sorted({0, layers.start, layers.stop, len(plan.layers)}))
    plan = replace(plan, bounds=bounds, shape=PipelineShape("1f1b", len(bounds) - 1, 1))
    with without_memory(device) as where:
        # its backward says nothing of what the forward keeps
        runner = StageRunner(config, mesh, plan, where, frozenset(), only_forward=True)
        [stage] = runner.stages_of(bounds.index(layers.start))
    return stage.run.kept


CASES = {
    "style": tuple(STYLES),
    "dtype": ("fp32", "bf16"),
    "length": (24, 128, 130),
    "dropout": ("0", "0.1"),
    "samples": (1, 3),
    "ranks": tuple(RANKS),
    "recompute": tuple(RECOMPUTE),
    "layers": ((0, 6), (1, 3), (2, 6)),
}


def flags_of(case) -> list[str]:
    return [
        *STYLES[case["style"]],
        *RECOMPUTE[case["recompute"]],
        *RANKS[case["ranks"]][1],
        *(["--bf16"] if case["dtype"] == "bf16" else []),
        "--seq-length",
        str(case["length"]),
        "--micro-batch-size",
        str(case["samples"]),
        "--hidden-dropout",
        case["dropout"],
        "--attention-dropout",
        case["dropout"],
    ]


@pytest.mark.parametrize(
    "case",
    cover_pairs(CASES),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_a_stage_keeps_what_was_planned_to_the_byte(case):
    """Blocked attention serves 128 positions, d being 16; with dropout none is fused."""
    measured, said, planned = kept(
        flags_of(case), RANKS[case["ranks"]][0], slice(*case["layers"])
    )
    assert measured == said == planned


@pytest.mark.parametrize(
    "case",
    cover_pairs(CASES),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_a_stage_is_planned_to_keep_on_a_gpu_what_the_closed_forms_give(case):
    """Not measured on a GPU here: two accounts of the documentation of torch's kernels."""
    ranks, flags = RANKS[case["ranks"]]
    config = parse([*JOB, *flags_of(case)], world_size=ranks)
    mesh, layers = (
        fake_mesh(Grid.fit(ranks, tp=ranks), ranks - 1),
        slice(*case["layers"]),
    )
    assert planned(config, mesh, layers, "cuda") == by_formula(
        config, describe_layers(config, mesh)[layers], "cuda"
    )


@pytest.mark.parametrize("dtype", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("style", ["gpt", "bert"])
@pytest.mark.parametrize("ranks", RANKS)
def test_logits_in_chunks_are_planned_not_to_be_kept(ranks, style, dtype):
    size, flags = RANKS[ranks]
    job = [
        *STYLES[style],
        *flags,
        *dtype,
        *"--seq-length 24 --micro-batch-size 3 --cross-entropy-chunks 5".split(),
    ]
    measured, said, planned_on_cpu = kept(job, size, slice(2, 6))
    assert measured == said == planned_on_cpu
    config = parse([*JOB, *job], world_size=size)
    mesh = fake_mesh(Grid.fit(size, tp=size), size - 1)
    assert planned(config, mesh, slice(2, 6), "cuda") == by_formula(
        config, describe_layers(config, mesh)[2:], "cuda"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_in_chunks_shrink_the_planned_peak_by_those_that_do_not_exist(device):
    job = (
        "--seq-length 512 --vocab-size 9000 --micro-batch-size 2 --global-batch-size 4 "
        "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0"
    ).split()
    whole, chunked = (
        plan_world(
            parse([*JOB, *job, "--cross-entropy-chunks", str(chunks)], world_size=1),
            0,
            device,
        ).rank_plan(0)
        for chunks in (1, 8)
    )
    logits = 2 * 512 * 9000 * 4
    assert whole.peak - chunked.peak == pytest.approx(logits * 7 / 8, rel=0.1)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "style, ranks, length",
    [
        ("gpt", "alone", 130),
        ("gqa", "tp", 24),
        ("llama", "alone", 24),
        ("llama", "tp", 130),
    ],
)
def test_compiled_attention_keeps_its_arguments_and_the_sums(
    style, ranks, length, dtype
):
    """Heads have 32 channels, which the kernel serves; a processor without it keeps what the others keep."""
    case = {
        "style": style,
        "dtype": dtype,
        "length": length,
        "dropout": "0",
        "samples": 2,
        "recompute": "kept",
        "ranks": ranks,
    }
    measured, said, planned = kept(
        ["--kv-channels", "32", *flags_of(case)], RANKS[ranks][0], slice(1, 2)
    )
    assert measured == said == planned


@pytest.mark.parametrize("style", ["gqa", "llama"])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("length, dropout", [(24, "0.1"), (128, "0"), (24, "0")])
def test_queries_of_one_group_and_of_one_sample_are_views_where_others_are_copies(
    style, samples, length, dropout
):
    case = {
        "style": style,
        "dtype": "fp32",
        "length": length,
        "dropout": dropout,
        "samples": samples,
        "recompute": "kept",
    }
    for ranks in ("alone", "tp"):
        measured, said, planned = kept(
            flags_of(case | {"ranks": ranks}), RANKS[ranks][0], slice(1, 2)
        )
        assert measured == said == planned


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("dtype, dropout", [([], "0"), (["--bf16"], "0"), ([], "0.1")])
@pytest.mark.parametrize(
    "drops",
    [
        [],
        (
            "--random-ltd --random-ltd-min-tokens 24 --random-ltd-steps 9 "
            "--random-ltd-tokens-per-step 8"
        ).split(),
    ],
    ids=["whole", "ltd"],
)
def test_documents_kept_apart_keep_what_is_said(style, dtype, dropout, drops):
    job = [
        *STYLES[style],
        *dtype,
        *"--seq-length 40 --micro-batch-size 3".split(),
        "--attention-dropout",
        dropout,
        *drops,
    ]
    (measured, said, planned), (_, joined, _) = (
        kept(job, 1, slice(1, 4), apart) for apart in (True, False)
    )
    assert measured == said == planned > joined


@pytest.mark.parametrize(
    "activation",
    [
        "gelu",
        "gelu_exact",
        "relu",
        "squared_relu",
        "swiglu",
        "geglu",
        "clamped_swiglu",
    ],
)
def test_every_activation_keeps_what_is_said(activation):
    job = ["--activation", activation, "--seq-length", "32", "--micro-batch-size", "2"]
    measured, said, planned = kept(job, 1, slice(1, 3))
    assert measured == said == planned


@pytest.mark.parametrize(
    "features",
    [
        "--qk-layernorm",
        "--apply-layernorm-1p",
        "--use-parallel-residual",
        "--qk-layernorm --apply-layernorm-1p --use-parallel-residual",
    ],
)
@pytest.mark.parametrize(
    "style, length", [("gpt", 128), ("gqa", 24), ("llama", 128), ("bert", 24)]
)
def test_features_of_blocks_keep_what_is_said(style, length, features):
    job = [
        *STYLES[style],
        *features.split(),
        *f"--seq-length {length} --micro-batch-size 2 --attention-dropout 0".split(),
    ]
    for ranks, recompute in (("alone", "selective"), ("sp", "kept")):
        more = RANKS[ranks][1] + RECOMPUTE[recompute]
        measured, said, planned = kept([*job, *more], RANKS[ranks][0], slice(1, 5))
        assert measured == said == planned


@pytest.mark.parametrize(
    "flag, dropout",
    [
        ("--bf16", "0"),
        ("--bf16", "0.1"),
        ("--rotary-interleaved", "0.1"),
        ("--use-parallel-residual --shared-block-norm", "0"),
        ("--norm-after-sublayer --embedding-multiplier 2 --softmax-scale 0.4", "0"),
        ("--normalization LayerNorm --disable-bias-in-norms", "0"),
    ],
)
def test_what_normalized_and_interleaved_heads_keep_is_planned(flag, dropout):
    job = [
        *STYLES["llama"],
        "--qk-layernorm",
        *flag.split(),
        *"--seq-length 128 --micro-batch-size 2".split(),
        "--attention-dropout",
        dropout,
    ]
    measured, _, planned = kept(job, 1, slice(0, 3))
    assert measured == planned


@pytest.mark.parametrize(
    "style, features",
    [
        ("gpt", "--sparse-attention fixed --sparse-block 8"),
        ("gqa", "--sparse-attention local --sparse-block 8 --bf16"),
        ("gpt", "--window-size 10,0"),
        ("gqa", "--window-size 100,0 --window-attn-skip-freq 2"),
        ("llama", "--window-size 20,0 --softmax-type learnable"),
        ("bert", "--window-size 10,5 --bf16"),
        ("llama", "--softmax-type off-by-one --bf16"),
        ("gpt", "--window-size 6,0 --softmax-type learnable"),
        ("llama", "--attention-logit-softcapping 5 --final-logit-softcapping 9"),
    ],
)
@pytest.mark.parametrize("length", ["24", "192"])
def test_windows_and_sinks_keep_what_is_planned(style, features, length):
    """By blocks, by tiles, fused with a mask, or with all probabilities."""
    job = [
        *STYLES[style],
        *features.split(),
        "--seq-length",
        length,
        "--micro-batch-size",
        "2",
    ]
    for dropout in ("0", "0.1"):
        measured, _, planned = kept(
            [*job, "--attention-dropout", dropout], 1, slice(1, 3)
        )
        assert measured == planned


@pytest.mark.parametrize(
    "style, features",
    [("llama", "--bf16"), ("bert", ""), ("gpt", "--softmax-type learnable")],
)
def test_compiled_layouts_keep_what_is_planned(style, features):
    """Blocks and channels that the kernel takes."""
    job = [
        *STYLES[style],
        *features.split(),
        *(
            "--sparse-attention fixed --sparse-block 16 --kv-channels 32 --seq-length 80 "
            "--micro-batch-size 2 --attention-dropout 0"
        ).split(),
    ]
    measured, _, planned = kept(job, 1, slice(1, 3))
    assert measured == planned


DROPPING = {
    "style": ("gpt", "llama"),
    "dtype": ("fp32", "bf16"),
    "kept": ("24", "128"),
    "dropout": ("0", "0.1"),
    "samples": (1, 3),
    "ranks": tuple(RANKS),
    "recompute": tuple(RECOMPUTE),
    "blocks": ("1", "0 1", "2"),
}


@pytest.mark.parametrize(
    "case",
    cover_pairs(DROPPING),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_blocks_that_drop_tokens_keep_what_is_said_to_the_byte(case):
    """A sequence has 130 tokens; some of the three blocks drop tokens."""
    job = [
        *flags_of(case | {"length": 130}),
        "--random-ltd",
        "--random-ltd-min-tokens",
        case["kept"],
        *"--random-ltd-steps 9 --random-ltd-tokens-per-step 8 --random-ltd-layer-ids".split(),
        *case["blocks"].split(),
    ]
    measured, said, planned = kept(job, RANKS[case["ranks"]][0], slice(1, 4))
    assert measured == said == planned


# Flags → whether attention keeps its own keys and values in a tensor of their own. The others are not in the
# closed form, which has attention of one process.
CLOSED = {
    "": 1,
    "--tensor-model-parallel-size 2 --sequence-parallel": 1,
    "--position-embedding-type rope --recompute-granularity selective": 0,
    "--recompute-granularity full": 0,
}


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16 --num-query-groups 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--position-embedding-type rope --recompute-granularity selective",
        "--recompute-granularity full",
        "--attention-dropout 0.1 --hidden-dropout 0.1 --model bert",
        "--sparse-attention fixed --sparse-block 16 --kv-channels 32",
    ],
)
def test_context_ranks_keep_what_was_planned_to_the_byte(kind, flags):
    """A rank keeps what one process keeps of its tokens, and keys and values once more, as they are sent."""
    ranks = 4 if "tensor" in flags else 2
    job = [
        *(
            "--hidden-dropout 0 --attention-dropout 0 --seq-length 64 --micro-batch-size 2 "
            "--context-parallel-size 2"
        ).split(),
        "--cp-comm-type",
        kind,
        *flags.split(),
    ]
    for layers in (slice(3, 6), slice(1, 3)):
        measured, said, planned = kept(job, ranks, layers)
        assert measured == planned
    if kind != "a2a" and flags in CLOSED:
        keys_and_values = (
            2 * (64 // 2) * 2 * 64 * 4 // (ranks // 2)
        )  # of 64 channels, over tp ranks
        assert measured == said + 2 * CLOSED[flags] * keys_and_values  # in two blocks


def test_without_fused_attention_the_bytes_of_a_block_are_those_of_the_paper():
    """Korthikanti et al. 2022, equations 1 and 2: 16 bits, one byte a mask. Ours lets go of the output of the
    second linear and of all masks, which are drawn again: 2 of their 34 bytes, 1 of the 5 of a score. The
    seeds of the masks of attention are kept instead, and queries times their scale."""
    model = parse(
        [*JOB, "--seq-length", "512", "--micro-batch-size", "3"], world_size=1
    ).model
    s, b, h, a = 512, 3, 64, 4
    plain = Workload(model, b, s, 1, False, torch.bfloat16, 8, "cuda")
    block = lambda recompute=None, **more: kept_by_layer(
        replace(plain, **more), "block", recompute
    )
    statistics, scaled, seeds = 4 * 4 * s * b, 2 * s * b * h, 8 * a * b
    assert block() == 32 * s * b * h + 4 * a * s * s * b + statistics + scaled + seeds
    assert block("selective") == 32 * s * b * h + statistics
    assert block("full") == 2 * s * b * h
    assert block("selective", tp=4, sequence_parallel=True) * 4 == block("selective")
    assert block("selective", tp=4) == s * b * h * (8 + 24 // 4) + statistics


@pytest.mark.parametrize("dtype", ["--bf16", "--fp16"])
@pytest.mark.parametrize("dropout", ["0", "0.1"])
@pytest.mark.parametrize("length", [24, 128])
def test_a_processor_without_products_of_sixteen_bits_keeps_copies_in_fp32(
    monkeypatch, dtype, dropout, length
):
    for module in (widened_products, activation_formulas):
        monkeypatch.setattr(
            module, "has_products", lambda dtype: dtype is torch.float32
        )
    job = [
        *STYLES["llama"],
        dtype,
        *f"--seq-length {length} --micro-batch-size 2".split(),
        "--hidden-dropout",
        dropout,
        "--attention-dropout",
        dropout,
    ]
    for recompute in ("kept", "selective"):
        measured, said, planned = kept([*job, *RECOMPUTE[recompute]], 1, slice(1, 3))
        assert measured == said == planned


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--bf16"],
        STYLES["llama"],
        ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"],
        RECOMPUTE["full"],
        RECOMPUTE["selective"],
        ["--cross-entropy-chunks", "2"],
    ],
    ids=" ".join,
)
def test_the_most_that_was_ever_alive_is_about_what_was_planned(flags):
    """One rank, two micro-batches: a twentieth below at most, half above: a layer at work counts beside all
    that is kept."""
    job = (
        "--hidden-dropout 0 --attention-dropout 0 --seq-length 192 --micro-batch-size 2 "
        "--global-batch-size 4 --tokenizer-type NullTokenizer"
    ).split()
    config = parse([*JOB, *job, *flags], world_size=1)
    replica = build_replica(config, Mesh(Grid(), 0))
    batch = MODELS[config.model.model].data.blank(4, 192)
    replica.optimizer.begin_step()
    with AliveBytes(peak=True) as alive, WORKSPACE.apart():
        replica.executor.run(batch.split(2))
    plan = plan_world(config, 0, "cpu").rank_plan(0)
    assert (
        0.95 * alive.peak < plan.kept + plan.at_work + plan.buffers < 1.55 * alive.peak
    )


@pytest.mark.parametrize(
    "tiles", [[], ["--tiled-mlp", "4", "--tiled-logits"]], ids=" ".join
)
def test_with_recomputation_the_plan_is_the_most_that_was_alive_with_rotary_tables_and_the_batch(
    tiles,
):
    """Blocks are computed again one at a time: the plan is within 1 %, the tables of all steps 4 to 6 % of it."""
    job = [
        *(
            "--hidden-dropout 0 --attention-dropout 0 --seq-length 3000 --micro-batch-size 1 "
            "--global-batch-size 1 --tokenizer-type NullTokenizer --position-embedding-type rope "
            "--num-attention-heads 1"
        ).split(),
        *RECOMPUTE["full"],
        *tiles,
    ]
    config = parse([*JOB, *job], world_size=1)
    replica = build_replica(config, Mesh(Grid(), 0))
    with AliveBytes(peak=True) as alive, WORKSPACE.apart():
        for _ in range(2):
            replica.optimizer.begin_step()
            replica.executor.run([MODELS[config.model.model].data.blank(1, 3000)])
    plan = plan_world(config, 0, "cpu").rank_plan(0)
    assert alive.peak <= plan.kept + plan.at_work + plan.buffers < 1.01 * alive.peak
    assert 2 * 3000 * 32 * 4 > 0.03 * alive.peak  # cos and sin [s, 1, 1, d/2]


@pytest.mark.parametrize("style", ["gpt", "llama", "bert"])
def test_the_workspace_of_widened_products_is_what_is_said_to_the_byte(
    style, monkeypatch
):
    for module in (widened_products, activation_formulas):
        monkeypatch.setattr(
            module, "has_products", lambda dtype: dtype is torch.float32
        )
    config = parse(
        [
            *JOB,
            *STYLES[style],
            *(
                "--bf16 --seq-length 192 --micro-batch-size 2 --global-batch-size 2 --vocab-size 900 "
                "--tokenizer-type NullTokenizer"
            ).split(),
        ],
        world_size=1,
    )
    replica = build_replica(config, Mesh(Grid(), 0))
    replica.optimizer.begin_step()
    with WORKSPACE.apart() as workspace:
        replica.executor.run([MODELS[config.model.model].data.blank(2, 192)])
        held = sum(memory.nbytes for memory in workspace.values())
    stages = plan_world(config, 0, "cpu").stages
    assert held == max(stage.run.workspace for stage in stages) > 0
    assert held == workspace_bytes(
        workload(config, "cpu"),
        [layer.sort for stage in stages for layer in stage.layers],
    )
