"""Rules about the shapes of the model, and about its distribution over the ranks."""

import os
import re
from collections.abc import Iterator

from .messages import divisors, either, flag, neighbours, written
from .run import RunConfig, all_options

TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
CHUNKS = "parallel.num_virtual_stages_per_pipeline_rank"
CHUNK_LAYERS = "parallel.num_layers_per_virtual_pipeline_stage"
HEADS, GROUPS = "model.num_attention_heads", "model.num_query_groups"


def heads(config: RunConfig) -> Iterator[str]:
    """Heads share the hidden size and the key/value heads evenly; rotary embeddings need an even number of
    channels.
    """
    model = config.model
    n, g, h = model.num_attention_heads, model.query_groups, model.hidden_size
    if n and g and n % g:
        yield (f"{written(config, HEADS)} is not a multiple of {written(config, GROUPS)}: each key/value "
               f"head serves the same number of query heads. Use {flag(GROUPS)} {either(divisors(n))}.")
    if model.group_query_attention and model.num_query_groups is None:
        yield (f"{written(config, 'model.group_query_attention')} without {flag(GROUPS)}: the number of "
               f"key/value heads is missing. Add {flag(GROUPS)} "
               f"N{f', N one of {either(divisors(n))}' if n else ''}.")
    if n and h and model.kv_channels is None and h % n:
        yield (f"{written(config, 'model.hidden_size')} is not a multiple of {written(config, HEADS)}: a "
               f"head would have {h / n:g} channels. Use {flag(HEADS)} "
               f"{either([d for d in divisors(h) if d <= 4 * n][-8:])}, or set the width of a head with "
               "--kv-channels.")
    elif n and h and model.position_embedding_type == "rope" and (
            rotated := int(model.head_dim * model.rotary_percent)) % 2:
        yield (f"rotary embeddings rotate pairs of channels, but {written(config, 'model.rotary_percent')} "
               f"of a head of {model.head_dim} channels is {rotated}, an odd number. Change {flag(HEADS)}, "
               "--kv-channels or --rotary-percent.")


def feed_forward(config: RunConfig) -> Iterator[str]:
    """The default width must not be rounded down to 0."""
    model = config.model
    if model.hidden_size and not model.ffn_size:
        yield (f"{written(config, 'model.activation')} with {written(config, 'model.hidden_size')}: the "
               "default width of the feed-forward block, 8/3 × hidden size rounded down to a multiple of 64, "
               f"would be 0. Set it, for instance --ffn-hidden-size {max(1, 8 * model.hidden_size // 3)}.")


def positions(config: RunConfig) -> Iterator[str]:
    """Each token of a sample needs a position."""
    seq, longest = config.model.seq_length, config.model.max_position_embeddings
    if seq and longest and seq > longest:
        yield (f"{written(config, 'model.seq_length')} is longer than "
               f"{written(config, 'model.max_position_embeddings')}: the last tokens would have no position. "
               f"Use --max-position-embeddings {seq} or more, or --seq-length {longest} or less.")


def not_available_yet(config: RunConfig) -> Iterator[str]:
    """Mesh axes that no layer uses yet."""
    path = "parallel.context_parallel_size"
    if config.get(path) > 1:
        yield (f"{written(config, path)}: context parallelism is not available yet. Use 1, or remove the "
               "flag.")


def zero_options(config: RunConfig) -> Iterator[str]:
    """Options of a higher ZeRO stage would have no effect; hierarchical weights and gradient dtypes have
    limits.
    """
    for path, least in (("zero.zero_accumulate", 2), ("zero.param_persistence_threshold", 3),
                        ("zero.prefetch_bucket_size", 3), ("zero.zero3_pin_stage", 3),
                        ("zero.zero_hpz_partition_size", 3)):
        if config.zero.stage < least and not config.is_default(path):
            yield (f"{written(config, path)} applies to ZeRO stage{'s 2 and 3' if least == 2 else ' 3'}, "
                   f"but {written(config, 'zero.stage')}. Remove it, or use {flag('zero.stage')} {least}.")
    h, n = config.zero.zero_hpz_partition_size, config.data_parallel_size
    if config.zero.stage == 3 and n % h:
        yield (f"{written(config, 'zero.zero_hpz_partition_size')} does not divide {n} data-parallel "
               f"rank{'s' * (n > 1)} into equal groups. Use {flag('zero.zero_hpz_partition_size')} "
               f"{either(divisors(n))}; 1 is off.")
    if h > 1 and config.zero.offload_param == "nvme":
        yield (f"{written(config, 'zero.zero_hpz_partition_size')} keeps a copy of the weights in each group "
               f"of ranks, but {written(config, 'zero.offload_param')} saves memory, and several ranks would "
               "write the same pages of the disk. Remove one of the two, or use --offload-param cpu.")
    grads, params = config.optimizer.gradient_dtype, config.optimizer.params_dtype
    if grads not in ("float32", params):
        yield (f"{written(config, 'optimizer.main_grads_dtype')}, but the weights are {params}: gradients "
               f"accumulate in fp32 or in the dtype of the weights. Use {flag('optimizer.main_grads_dtype')} "
               "fp32.")


def communication(config: RunConfig) -> Iterator[str]:
    """Options that divide gradients before an fp16 reduction need fp32 accumulation, and exclude each other.

    With other dtypes `combine` leaves these options out.
    """
    accumulate = config.optimizer.main_grads_dtype
    given = [path for path in ("zero.gradient_predivide_factor", "zero.prescale_gradients")
             if not config.is_default(path)]
    for path in given if accumulate == "fp16" else ():
        yield (f"{written(config, path)} prevents overflow when gradients are reduced in fp16 and accumulate "
               "in fp32. Here they also accumulate in fp16, where the division would round the smallest to "
               f"0. Remove it, or use {flag('zero.communication_data_type')} fp16 --main-grads-dtype "
               "fp32.")
    if len(given) == 2:
        yield (f"{written(config, given[0])} and {written(config, given[1])} both set the divisor of "
               "gradients; the second sets it to the number of data-parallel ranks. Give only one.")


def offloading(config: RunConfig) -> Iterator[str]:
    """Offloading needs a ZeRO stage that splits what is offloaded; a disk needs a writable folder."""
    zero = config.zero
    for path, least, what in (("zero.offload_optimizer", 1, "optimizer state"),
                              ("zero.offload_param", 3, "weights")):
        if config.get(path) != "none" and zero.stage < least:
            yield (f"{written(config, path)} offloads {what}, which ZeRO splits from stage {least} on, but "
                   f"{written(config, 'zero.stage')}. Use {flag('zero.stage')} "
                   f"{least}{'' if least == 3 else ', 2 or 3'}, or remove it.")
    for path in ("zero.offload_optimizer_ratio", "zero.sub_group_size"):
        if zero.offload_optimizer == "none" and not config.is_default(path):
            yield (f"{written(config, path)} applies to offloaded optimizer state, but the optimizer is not "
                   "offloaded. Remove it, or use --offload-optimizer cpu.")
    folders = zero.disk_folders()
    for path in ("zero.offload_nvme_path", "zero.offload_param_nvme_path", "zero.nvme_io",
                 "zero.nvme_block_size", "zero.nvme_queue_depth", "zero.nvme_threads"):
        if not folders and not config.is_default(path):
            yield (f"{written(config, path)} applies to offloading to a disk, but nothing is offloaded to a "
                   "disk. Remove it, or use --offload-optimizer nvme.")
    for path, folder in folders.items():
        name = flag("zero.offload_nvme_path")
        if folder is None:
            yield (f"{written(config, path)} needs a folder for its scratch file. Give one on a fast local "
                   f"disk with {name}.")
        elif config.plan.is_dry:
            continue                                         # the folder is on the machines that will run
        elif not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            wrong = "is not writable" if os.path.isdir(folder) else "does not exist"
            yield (f"{written(config, path)}: the folder {folder} {wrong}. Give another with {name}, or "
                   "create it on every node.")


def world(config: RunConfig) -> Iterator[str]:
    """The world size is a multiple of the ranks that hold one copy of the model."""
    ranks, size = config.world_size, config.parallel.model_parallel_size
    if ranks % size and config.parallel.context_parallel_size == 1:  # `not_available_yet` reports others
        tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
        fits = [t for t in divisors(ranks) if (ranks // t) % pp == 0 and _tp_fits(config, t)]
        options = [f"{flag(TP)} {either(fits)}"] if fits and ranks % pp == 0 else []
        stages = [p for p in divisors(ranks) if (ranks // p) % tp == 0
                  and p <= (config.model.num_layers or p)]
        options += [f"{flag(PP)} {either(stages)}"] if stages and ranks % tp == 0 else []
        yield (f"world size {ranks} is not divisible by {written(config, TP)} × {written(config, PP)} = "
               f"{size}, the ranks that hold one copy of the model. Start {size}, {2 * size} or {3 * size} "
               f"ranks{', or use ' + ' or '.join(options) if options else ''}."
               f"{' In a plan, --world-size sets the number of ranks.' * config.plan.is_dry}")


def tensor_parallel(config: RunConfig) -> Iterator[str]:
    """Heads, feed-forward width and, with sequence parallelism, tokens are divisible by the tensor-parallel
    size.
    """
    model, t = config.model, config.parallel.tensor_model_parallel_size
    whole = [(HEADS, model.num_attention_heads, "each rank holds whole heads"),
             (GROUPS, model.num_query_groups, "each rank holds whole key/value heads"),
             ("model.ffn_hidden_size", model.ffn_hidden_size or (model.hidden_size and model.ffn_size),
              "each rank holds an equal part of the feed-forward block")]
    fits = [d for d in divisors(model.num_attention_heads or 1) if _tp_fits(config, d)]
    for path, number, reason in whole:
        if number and number % t:
            is_given = config.get(path) is not None
            named = written(config, path) if is_given else f"the feed-forward width {number}"
            yield (f"{named} is not a multiple of {written(config, TP)}: {reason}. Use {flag(TP)} "
                   f"{either(fits)}.")
    if config.parallel.sequence_parallel and model.seq_length and model.seq_length % t:
        yield (f"{written(config, 'model.seq_length')} is not a multiple of {written(config, TP)}: with "
               "--sequence-parallel each rank holds an equal slice of the sequence. Use --seq-length "
               f"{neighbours(model.seq_length, t)}, or remove --sequence-parallel.")


def pipeline(config: RunConfig) -> Iterator[str]:
    """Each stage has a layer, and an explicit layout has all layers."""
    layers, ranks = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    cut, stages = config.parallel.pipeline_layout, ranks * (config.pipeline_chunks or 1)
    several = f" × {written(config, _given_chunks(config))}" if config.pipeline_chunks else ""
    if layers and cut is None and layers < stages:
        fits = f"at most {layers} stages in all"
        if stages == ranks:
            fits = f"{flag(PP)} {either(range(1, layers + 1))}"
        yield (f"{written(config, 'model.num_layers')} is less than {written(config, PP)}{several}: each "
               f"stage needs at least one layer. Use {fits}, or --pipeline-layout, which can give the "
               "embedding its own stage.")
    elif layers and cut is not None and re.fullmatch(r"\d+(,\d+)*", cut):
        counts = [int(count) for count in cut.split(",")]
        example = ",".join(str(layers // stages + (i < layers % stages)) for i in range(stages))
        fits = len(counts) == stages if config.pipeline_chunks else len(counts) % ranks == 0
        if not fits or sum(counts) != layers:
            yield (f"{written(config, 'parallel.pipeline_layout')} has {len(counts)} stages and "
                   f"{sum(counts)} layers, but there are {written(config, PP)}{several} and "
                   f"{written(config, 'model.num_layers')}. Use for instance --pipeline-layout {example}.")


def virtual_stages(config: RunConfig) -> Iterator[str]:
    """Options that put several stages on each pipeline rank."""
    parallel, layers = config.parallel, config.model.num_layers
    given = [path for path in (CHUNKS, CHUNK_LAYERS) if config.get(path) is not None]
    if len(given) == 2:
        yield (f"{written(config, CHUNKS)} and {written(config, CHUNK_LAYERS)} both set the number of stages "
               "per rank. Give only one.")
        return
    ranks, thick = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if given and ranks == 1:
        yield (f"{written(config, given[0])} puts several stages on each pipeline rank, to shorten the idle "
               f"time of the pipeline, but {written(config, PP)}. Remove it, or use {flag(PP)} 2 or more.")
    elif thick and layers and layers % (ranks * thick):
        even = divisors(layers // ranks) if layers % ranks == 0 else []
        advice = f"Use {flag(CHUNK_LAYERS)} {either(even)}" if even else (
            f"Use {flag(PP)} {either([p for p in divisors(layers) if p > 1] or [1])}")
        yield (f"{written(config, 'model.num_layers')} is not a multiple of {written(config, PP)} × "
               f"{written(config, CHUNK_LAYERS)} = {ranks * thick}: every rank holds the same number of "
               f"stages. {advice}, or set the number of stages with {flag(CHUNKS)}, with which stages may "
               "differ in their number of layers.")


def pipeline_tuning(config: RunConfig) -> Iterator[str]:
    """Options of a cut that is not used would have no effect."""
    parallel, cut = config.parallel, "parallel.pipeline_cut"
    if parallel.pipeline_costs_path is not None and parallel.pipeline_cut != "measured":
        yield (f"{written(config, 'parallel.pipeline_costs_path')} applies to --pipeline-cut measured, but "
               f"{written(config, cut)}. Remove it, or use --pipeline-cut measured.")
    if parallel.pipeline_layout and parallel.pipeline_cut != all_options()[cut].default:
        yield (f"{written(config, cut)} and {written(config, 'parallel.pipeline_layout')} both assign the "
               "layers to stages. Give only one.")


def _given_chunks(config: RunConfig) -> str:
    """The option that set the number of stages."""
    return CHUNKS if config.parallel.num_virtual_stages_per_pipeline_rank else CHUNK_LAYERS


def rank_order(config: RunConfig) -> Iterator[str]:
    """Each mesh axis occurs once."""
    default = "tp-cp-ep-dp-pp"
    if sorted(config.parallel.rank_order.split("-")) != sorted(default.split("-")):
        yield (f"{written(config, 'parallel.rank_order')} must contain each axis of {default} once. Give "
               "them in any order, the axis that varies fastest with the rank first.")


def _tp_fits(config: RunConfig, size: int) -> bool:
    """Whether the model can be split over a tensor-parallel group of this size."""
    model = config.model
    width = model.ffn_hidden_size or (model.hidden_size and model.ffn_size)
    numbers = (model.num_attention_heads, model.num_query_groups, width)
    return all(number % size == 0 for number in numbers if number)


LAYOUT_RULES = (heads, feed_forward, positions, not_available_yet, zero_options, communication, offloading,
                world, tensor_parallel, pipeline, virtual_stages, pipeline_tuning, rank_order)
