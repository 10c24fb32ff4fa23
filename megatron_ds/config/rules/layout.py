"""Rules about the shapes of the model, and about its distribution over the ranks."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..messages import divisors, either, flag, given, neighbours
from ..options.parallel import COMM_GROUPS
from ..run import RunConfig
from .position import POSITION_RULES
from .uneven_stages import ACCOUNTS, COUNTS, given_of, uneven_layout

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CHUNKS = "parallel.num_virtual_stages_per_pipeline_rank"
CHUNK_LAYERS = "parallel.num_layers_per_virtual_pipeline_stage"
DIVISORS = ("zero.gradient_predivide_factor", "zero.prescale_gradients")


def heads(config: RunConfig) -> Iterator[str]:
    """Heads share the hidden size and the key/value heads evenly; rotary embeddings pair their channels."""
    # Query heads and key/value heads.
    model = config.model
    n = model.num_attention_heads
    g = model.query_groups
    h = model.hidden_size
    if n and g and n % g:
        yield (
            "[num_attention_heads] is not a multiple of [num_query_groups]: each key/value head serves "
            f"the same number of query heads. Use --num-query-groups {either(divisors(n))}."
        )
    if model.group_query_attention and model.num_query_groups is None:
        yield (
            "[group_query_attention] without --num-query-groups: the number of key/value heads is "
            f"missing. Add --num-query-groups N{f', N one of {either(divisors(n))}' if n else ''}."
        )
    # The width of a head.
    if n and h and model.kv_channels is None and h % n:
        yield (
            f"[hidden_size] is not a multiple of [num_attention_heads]: a head would have {h / n:g} "
            f"channels. Use --num-attention-heads {either([d for d in divisors(h) if d <= 4 * n][-8:])}, "
            "or set the width of a head with --kv-channels."
        )
    elif (
        n
        and h
        and model.is_rotary
        and (rotated := int(model.head_dim * model.rotary_percent)) % 2
    ):
        yield (
            "rotary embeddings rotate pairs of channels, but [rotary_percent] of a head of "
            f"{model.head_dim} channels is {rotated}, an odd number. Change --num-attention-heads, "
            "--kv-channels or --rotary-percent."
        )


def feed_forward(config: RunConfig) -> Iterator[str]:
    """The default width must not be rounded down to 0."""
    model = config.model
    if model.hidden_size and not model.ffn_size:
        yield (
            "[activation] with [hidden_size]: the default width of the feed-forward block, 8/3 × hidden "
            "size rounded down to a multiple of 64, would be 0. Set it, for instance --ffn-hidden-size "
            f"{max(1, 8 * model.hidden_size // 3)}."
        )


def context_parallel(config: RunConfig) -> Iterator[str]:
    """Ranks that split a sequence hold equal parts of it, or equal numbers of heads."""
    # One way of communication for each layer.
    model = config.model
    parallel = config.parallel
    c = parallel.context_parallel_size
    kinds = parallel.cp_comm_type
    if c == 1:
        return
    if len(kinds) > 1 and model.num_layers and len(kinds) != model.num_layers:
        yield (
            f"[cp_comm_type] names {len(kinds)} ways for [num_layers]. Give one, or one for each layer."
        )
    # Equal parts of the sequence.
    t = parallel.tensor_model_parallel_size
    chunks = config.sequence_parts
    if model.seq_length and model.seq_length % chunks:
        yield (
            f"[seq_length] is not a multiple of {chunks}: each of [context_parallel_size] ranks holds "
            f"{_parts(config)} of a sequence. Use --seq-length "
            f"{neighbours(model.seq_length, chunks)}."
        )
    # The two levels of a2a+p2p.
    sizes = parallel.hierarchical_context_parallel_sizes
    if "a2a+p2p" in kinds and (len(sizes) != 2 or sizes[0] * sizes[1] != c):
        yield _two_levels(config)
    # Equal numbers of heads, where heads are divided.
    heads = model.num_attention_heads
    if not heads or heads % t:
        return
    groups = (model.num_query_groups or heads) // t
    fits = [
        d for d in divisors(heads // t) if groups % d == 0 or d % max(groups, 1) == 0
    ]
    for kind, ranks, name in (
        ("a2a", c, "context_parallel_size"),
        ("a2a+p2p", sizes[0], "hierarchical_context_parallel_sizes"),
    ):
        if kind in kinds and ranks not in fits:
            yield (
                f"[cp_comm_type] divides heads among {ranks} ranks ([{name}]), but each tensor-parallel "
                f"rank has {heads // t} heads in {groups} groups. Use {either(fits)} ranks, or "
                "--cp-comm-type p2p."
            )


def _two_levels(config: RunConfig) -> str:
    c = config.parallel.context_parallel_size
    path = "parallel.hierarchical_context_parallel_sizes"
    # A size of 1 would be p2p alone, and c would be a2a.
    inner = [d for d in divisors(c) if 1 < d < c] or divisors(c)
    use = f"{flag(path)} {either([f'{d} {c // d}' for d in inner])}"
    if config.is_default(path):
        return (
            "[cp_comm_type] needs the numbers of ranks that exchange tokens for heads and of ranks that "
            f"pass keys on, whose product is [context_parallel_size]. Add {use}."
        )
    return (
        "[hierarchical_context_parallel_sizes] are not two numbers whose product is "
        "[context_parallel_size]: ranks that exchange tokens for heads × ranks that pass keys on. Use "
        f"{use}."
    )


def _parts(config: RunConfig) -> str:
    part = "two equal chunks" if config.is_zigzag else "an equal run"
    if config.parallel.sequence_parallel:
        return f"{part}, divided among tensor-parallel ranks,"
    return part


def zero_options(config: RunConfig) -> Iterator[str]:
    """Hierarchical weights and gradient dtypes have limits."""
    # Groups of hierarchical weights.
    h = config.zero.zero_hpz_partition_size
    n = config.data_parallel_size
    if config.zero.stage == 3 and n % h:
        yield (
            f"[zero_hpz_partition_size] does not divide {n} data-parallel rank{'s' if n > 1 else ''} into equal "
            f"groups. Use --zero-hpz-partition-size {either(divisors(n))}; 1 is off."
        )
    if h > 1 and config.zero.offload_param == "nvme":
        yield (
            "[zero_hpz_partition_size] keeps a copy of the weights in each group of ranks, but "
            "[offload_param] saves memory, and several ranks would write the same pages of the disk. "
            "Remove one of the two, or use --offload-param cpu."
        )
    # The dtype in which gradients accumulate.
    grads = config.optimizer.gradient_dtype
    params = config.optimizer.params_dtype
    if grads not in ("float32", params):
        yield (
            f"[main_grads_dtype], but the weights are {params}: gradients accumulate in fp32 or in the "
            "dtype of the weights. Use --main-grads-dtype fp32."
        )


def quantization(config: RunConfig) -> Iterator[str]:
    """ZeRO++: blocks need something that is quantized, on the device, in no other dtype."""
    zero = config.zero
    if zero.zero_quantized_weights and zero.offload_param != "none":
        yield (
            "[zero_quantized_weights] needs the weights of a rank on its device, where they are encoded "
            "after each update, but [offload_param]. Remove one of the two; --offload-optimizer can "
            "remain."
        )
    if zero.zero_quantized_gradients and zero.communication_data_type:
        yield (
            "[zero_quantized_gradients] sends gradients as 4-bit integers, but [communication_data_type] "
            "asks for another format. Remove one of the two."
        )


def communication(config: RunConfig) -> Iterator[str]:
    """Dividing gradients prevents an overflow of fp16. `combine` leaves these options out otherwise."""
    if config.optimizer.main_grads_dtype == "fp16":
        yield from given(
            config,
            DIVISORS,
            "prevents overflow when gradients are reduced in fp16 and "
            "accumulate in fp32. Here they also accumulate in fp16, where the "
            "division would round the smallest to 0. Remove it, or use "
            "--communication-data-type fp16 --main-grads-dtype fp32.",
        )
    if not any(map(config.is_default, DIVISORS)):
        yield (
            "[gradient_predivide_factor] and [prescale_gradients] both set the divisor of gradients; the "
            "second sets it to the number of data-parallel ranks. Give only one."
        )


def offloading(config: RunConfig) -> Iterator[str]:
    """Offloading needs a ZeRO stage that splits what is offloaded; a disk needs a writable folder."""
    zero = config.zero
    folders = zero.disk_folders()
    # Each folder of a disk is there and writable.
    for path, folder in folders.items():
        of_weights = (
            path == "zero.offload_param" and zero.offload_param_nvme_path is not None
        )
        flag = "--offload-param-nvme-path" if of_weights else "--offload-nvme-path"
        if folder is None:
            yield (
                f"[{path}] needs a folder for its scratch file. Give one on a fast local disk with "
                "--offload-nvme-path."
            )
        elif config.plan.is_dry:
            continue  # the folder is on the machines that will run
        elif wrong := _why_not_writable(Path(folder)):
            yield (
                f"[{path}]: no scratch file can be made in {folder}, because {wrong}. Give another folder "
                f"with {flag}, or create it on every node."
            )


def _why_not_writable(folder: Path) -> str | None:
    """Why nothing can be written in the folder, nor the folder be made; None: it can."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def world(config: RunConfig) -> Iterator[str]:
    """The world size is a multiple of the ranks that hold one copy of the model."""
    # The sizes, each with the others as they are, that would divide the world.
    ranks = config.world_size
    size = config.parallel.model_parallel_size
    if ranks % size:
        tp = config.parallel.tensor_model_parallel_size
        pp = config.parallel.pipeline_model_parallel_size
        cp = config.parallel.context_parallel_size
        fits = [
            t
            for t in divisors(ranks)
            if (ranks // t) % (pp * cp) == 0 and _tp_fits(config, t)
        ]
        options = [f"{TP} {either(fits)}"] if fits and ranks % (pp * cp) == 0 else []
        stages = [
            p
            for p in divisors(ranks)
            if (ranks // p) % (tp * cp) == 0 and p <= (config.model.num_layers or p)
        ]
        options += (
            [f"{PP} {either(stages)}"] if stages and ranks % (tp * cp) == 0 else []
        )
        if cp > 1 and ranks % (tp * pp) == 0:
            options.append(
                f"--context-parallel-size {either(divisors(ranks // (tp * pp)))}"
            )
        # The message, with the other world sizes.
        hint = " In a plan, --world-size sets the number of ranks."
        yield (
            f"world size {ranks} is not divisible by [tensor_model_parallel_size] × "
            f"{'[context_parallel_size] × ' if cp > 1 else ''}[pipeline_model_parallel_size] = {size}, the ranks "
            "that hold one copy of the model. Start "
            f"{size}, {2 * size} or {3 * size} ranks{', or use ' if options else ''}{' or '.join(options)}."
            f"{hint if config.plan.is_dry else ''}"
        )


def tensor_parallel(config: RunConfig) -> Iterator[str]:
    """The tensor-parallel size divides heads, feed-forward width and, with sequence parallelism, tokens."""
    # Sizes that divide all three widths are the advice for each.
    model = config.model
    t = config.parallel.tensor_model_parallel_size
    width = _ffn_width(config)
    fits = [d for d in divisors(model.num_attention_heads or 1) if _tp_fits(config, d)]
    for name, number, reason in (
        (
            "[num_attention_heads]",
            model.num_attention_heads,
            "each rank holds whole heads",
        ),
        (
            "[num_query_groups]",
            model.num_query_groups,
            "each rank holds whole key/value heads",
        ),
        (
            "[ffn_hidden_size]"
            if model.ffn_hidden_size
            else f"the feed-forward width {width}",
            width,
            "each rank holds an equal part of the feed-forward block",
        ),
    ):
        if number and number % t:
            yield (
                f"{name} is not a multiple of [tensor_model_parallel_size]: {reason}. Use {TP} "
                f"{either(fits)}."
            )
    # Tokens.
    # `context_parallel` reports others.
    alone = config.parallel.context_parallel_size == 1
    if (
        config.parallel.sequence_parallel
        and alone
        and model.seq_length
        and model.seq_length % t
    ):
        yield (
            "[seq_length] is not a multiple of [tensor_model_parallel_size]: with --sequence-parallel "
            "each rank holds an equal slice of the sequence. Use --seq-length "
            f"{neighbours(model.seq_length, t)}, or remove --sequence-parallel."
        )


def pipeline(config: RunConfig) -> Iterator[str]:
    """Each stage has a layer, and an explicit layout has all layers."""
    # The number of stages.
    layers = config.model.num_layers
    ranks = config.parallel.pipeline_model_parallel_size
    cut = config.parallel.pipeline_layout
    stages = ranks * (config.pipeline_chunks or 1)
    several = f" × [{_chunks(config)}]" if config.pipeline_chunks else ""
    # Without a layout each stage has a layer.
    if layers and cut is None and layers < stages:
        fits = f"at most {layers} stages in all"
        if stages == ranks:
            fits = f"{PP} {either(range(1, layers + 1))}"
        yield (
            f"[num_layers] is less than [pipeline_model_parallel_size]{several}: each stage needs at "
            f"least one layer. Use {fits}, or --pipeline-layout, which can give the embedding its own "
            "stage."
        )
    # A layout of numbers; others are checked where they are read.
    elif layers and cut is not None and re.fullmatch(r"\d+(,\d+)*", cut):
        counts = [int(count) for count in cut.split(",")]
        are_stages = (
            len(counts) == stages
            if config.pipeline_chunks
            else len(counts) % ranks == 0
        )
        if not are_stages or sum(counts) != layers:
            yield (
                f"[pipeline_layout] has {len(counts)} stages and {sum(counts)} layers, but there are "
                f"[pipeline_model_parallel_size]{several} and [num_layers]. Use "
                f"{_example_layout(layers, stages)}."
            )


def _example_layout(layers: int, stages: int) -> str:
    """Embedding, decoder layers and head on that many stages, with something on each of them."""
    if layers + 2 < stages:
        return f"at most {layers + 2} stages in all: the embedding, each layer and the head on one of its own"
    if layers < stages:
        text = "|".join(["E", *"t" * layers, *"L" * (stages - layers - 1)])
    else:
        text = ",".join(
            str(layers // stages + (i < layers % stages)) for i in range(stages)
        )
    return f"for instance --pipeline-layout {text}"


def uneven_pipeline(config: RunConfig) -> Iterator[str]:
    """First and last stages of another number of layers leave the same number to all others."""
    # `wanted` has become the layout where the options can be met.
    parallel = config.parallel
    wanted = uneven_layout(config)
    counts = given_of(config, COUNTS)
    accounts = given_of(config, ACCOUNTS)
    if (
        not config.model.num_layers
        or not counts + accounts
        or wanted
        and wanted == parallel.pipeline_layout
    ):
        return
    # The reason why they cannot, the most general one first.
    if parallel.pipeline_layout is not None:
        yield from given(
            config,
            [*counts, *accounts],
            "changes the layers of stages, which "
            "[pipeline_layout] states. Give only one of the two.",
        )
    elif parallel.pipeline_model_parallel_size == 1:
        yield from given(
            config,
            counts,
            "without --pipeline-model-parallel-size: there is one stage. Remove it.",
        )
    elif counts and accounts:
        yield from given(
            config,
            accounts,
            f"cannot be combined with [{counts[0]}], which states the layers "
            "of a stage. Give only one of the two.",
        )
    elif counts and (config.pipeline_chunks or 1) > 1:
        yield from given(
            config,
            counts,
            f"is the layers of a rank, which [{_chunks(config)}] divides into "
            "several stages. Use --pipeline-layout, which states the layers of each stage.",
        )
    elif counts:
        yield from given(
            config,
            counts,
            "cannot be the layers of a stage: the other stages cannot share "
            "the rest of [num_layers] evenly. Use --pipeline-layout, which states the layers "
            "of each stage.",
        )
    else:
        yield _uneven_accounts(config, accounts)


def _uneven_accounts(config: RunConfig, accounts: list[str]) -> str:
    stages = config.parallel.pipeline_model_parallel_size * (
        config.pipeline_chunks or 1
    )
    several = f" × [{_chunks(config)}]" if config.pipeline_chunks else ""
    total = config.model.num_layers + len(accounts)
    fits = either(
        [
            n - len(accounts)
            for n in (total // stages * stages, (total // stages + 1) * stages)
            if n > len(accounts)
        ]
    )
    names = " and ".join(f"[{path}]" for path in accounts)
    return (
        f"{names} with [num_layers] makes {total} layers, which {stages} stages, "
        f"[pipeline_model_parallel_size]{several}, cannot share evenly. Use --num-layers {fits}, or "
        "--pipeline-layout, which states the layers of each stage."
    )


def _chunks(config: RunConfig) -> str:
    """The option that sets the number of stages on each rank."""
    return (
        CHUNKS if config.parallel.num_virtual_stages_per_pipeline_rank else CHUNK_LAYERS
    )


def virtual_stages(config: RunConfig) -> Iterator[str]:
    """Options that put several stages on each pipeline rank."""
    # One of the two options.
    parallel = config.parallel
    layers = config.model.num_layers
    chosen = [path for path in (CHUNKS, CHUNK_LAYERS) if config.get(path) is not None]
    if len(chosen) == 2:
        yield f"[{CHUNKS}] and [{CHUNK_LAYERS}] both set the number of stages per rank. Give only one."
        return
    # Stages of equal size on several ranks.
    ranks = parallel.pipeline_model_parallel_size
    thick = parallel.num_layers_per_virtual_pipeline_stage
    if chosen and ranks == 1:
        yield (
            f"[{chosen[0]}] puts several stages on each pipeline rank, to shorten the idle time of the "
            f"pipeline, but [pipeline_model_parallel_size]. Remove it, or use {PP} 2 or more."
        )
    elif thick and layers and layers % (ranks * thick):
        even = divisors(layers // ranks) if layers % ranks == 0 else []
        advice = (
            f"Use --num-layers-per-virtual-pipeline-stage {either(even)}"
            if even
            else (f"Use {PP} {either([p for p in divisors(layers) if p > 1] or [1])}")
        )
        yield (
            f"[num_layers] is not a multiple of [pipeline_model_parallel_size] × [{CHUNK_LAYERS}] = "
            f"{ranks * thick}: every rank holds the same number of stages. {advice}, or set the number of "
            "stages with --num-virtual-stages-per-pipeline-rank, with which stages may differ in their "
            "number of layers."
        )


def pipeline_tuning(config: RunConfig) -> Iterator[str]:
    """Options of a cut that is not used would have no effect."""
    parallel = config.parallel
    if parallel.pipeline_layout and not config.is_default("parallel.pipeline_cut"):
        yield "[pipeline_cut] and [pipeline_layout] both assign the layers to stages. Give only one."


def nccl_blocks(config: RunConfig) -> Iterator[str]:
    """Limits name a group and a number."""
    for text in config.parallel.nccl_max_ctas:
        group, _, number = text.partition("=")
        if group not in COMM_GROUPS or not re.fullmatch("[1-9][0-9]{0,3}", number):
            yield (
                f"[nccl_max_ctas]: {text!r} is not GROUP=NUMBER. Use one of the groups "
                f"{', '.join(COMM_GROUPS)} and a number from 1 to 9999, such as pp=2."
            )


def rank_order(config: RunConfig) -> Iterator[str]:
    """Each mesh axis occurs once."""
    default = "tp-cp-ep-dp-pp"
    if sorted(config.parallel.rank_order.split("-")) != sorted(default.split("-")):
        yield (
            f"[rank_order] must contain each axis of {default} once. Give them in any order, the axis "
            "that varies fastest with the rank first."
        )


def _ffn_width(config: RunConfig) -> int | None:
    model = config.model
    return model.ffn_hidden_size or (model.hidden_size and model.ffn_size)


def _tp_fits(config: RunConfig, size: int) -> bool:
    """Whether the model can be split over a tensor-parallel group of this size."""
    numbers = (
        config.model.num_attention_heads,
        config.model.num_query_groups,
        _ffn_width(config),
    )
    return all(number % size == 0 for number in numbers if number)


LAYOUT_RULES = (
    heads,
    feed_forward,
    *POSITION_RULES,
    context_parallel,
    zero_options,
    quantization,
    communication,
    offloading,
    world,
    tensor_parallel,
    pipeline,
    uneven_pipeline,
    virtual_stages,
    pipeline_tuning,
    rank_order,
    nccl_blocks,
)
