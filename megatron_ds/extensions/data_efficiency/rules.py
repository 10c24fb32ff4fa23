"""Rules about curricula and random-LTD."""

from collections.abc import Iterator

from ...config.messages import flag, neighbours
from ...config.rules.data import is_number
from ...config.run import RunConfig, all_options
from ...config.sources.reading import attempt
from .curricula import length_difficulty, read_metric
from .difficulty import Difficulty
from .options import RESHAPE, CurriculumConfig, RandomLTDConfig

LENGTH_OPTIONS = (
    "schedule",
    "min_length",
    "max_length",
    "steps",
    "length_step",
    "root_degree",
    "lengths",
    "until_steps",
    "function",
)
USED_BY = {
    "steps": ("fixed_linear", "fixed_root"),
    "length_step": ("fixed_linear", "fixed_root"),
    "root_degree": ("fixed_root",),
    "lengths": ("fixed_discrete",),
    "until_steps": ("fixed_discrete",),
    "function": ("custom",),
}


def lengths(config: RunConfig) -> Iterator[str]:
    """A curriculum over lengths has the options of its schedule, and lengths that the ranks can split."""
    # Options need a curriculum.
    curriculum = config.of(CurriculumConfig)
    whole = config.model.seq_length
    chosen = [
        name
        for name in LENGTH_OPTIONS
        if not config.is_default(f"curriculum.curriculum_{name}")
    ]
    if curriculum.curriculum_type is None:
        if chosen:
            yield (
                f"[curriculum_{chosen[0]}] has no effect without --curriculum-type. Add --curriculum-type "
                "seqlen_truncate or seqlen_reshape, or remove it."
            )
        return
    if config.data.sft:
        yield (
            "[curriculum_type] with --sft: shorter rows cut conversations, so that answers are left out, or lose "
            "the questions before them. Remove one of the two."
        )
        return
    # Options of the schedule.
    if whole is None:
        return
    kind = curriculum.curriculum_schedule
    longest = curriculum.curriculum_max_length
    for name in chosen:
        if kind not in USED_BY.get(name, (kind,)):
            yield (
                f"[curriculum_{name}] has no effect with --curriculum-schedule {kind}. Remove it, or use "
                f"{' or '.join(USED_BY[name])}."
            )
            return
    # Lengths that the schedule reaches.
    if longest is not None and longest > whole:
        yield (
            f"[curriculum_max_length] is longer than [seq_length], the length of a sample. Use {whole} or "
            "less."
        )
        return
    yield from _split_by_ranks(config, length_difficulty(curriculum, whole))


def _split_by_ranks(config: RunConfig, difficulty: Difficulty) -> Iterator[str]:
    """Ranks that share a sequence divide every length."""
    parts = config.sequence_parts
    train = config.train
    if parts == 1:
        return
    samples = train.train_samples or (train.train_tokens or 0) // max(
        1, getattr(difficulty, "minimum", 1)
    )
    steps = train.train_iters or samples // (train.global_batch_size or 1)
    for step in range(1, steps + 1):
        length = difficulty.at(step)
        if length % parts:
            yield (
                f"the curriculum contains the length {length}, which is not a multiple of {parts}: "
                f"{_sharing(config)} share a sequence equally. Use lengths, and a "
                f"--curriculum-length-step, that are multiples of {parts}."
            )
        if length % parts or length == difficulty.maximum:
            return


def _sharing(config: RunConfig) -> str:
    """The sizes of the ranks that share a sequence."""
    names = ["[context_parallel_size]"] * (config.parallel.context_parallel_size > 1)
    names += [
        "[tensor_model_parallel_size] with [sequence_parallel]"
    ] * config.parallel.sequence_parallel
    return "ranks of " + " and ".join(names)


def samples(config: RunConfig) -> Iterator[str]:
    """A curriculum over samples sets their order, and needs a corpus with an analysis."""
    # Options need metrics.
    curriculum = config.of(CurriculumConfig)
    data = config.data
    if not curriculum.curriculum_metrics:
        if curriculum.curriculum_cluster_path is not None:
            yield (
                '[curriculum_cluster_path] has no effect without metrics. Add a "curriculum_metrics" '
                "block, or remove it."
            )
        return
    # The metrics themselves.
    problems: list[str] = []
    metrics = [
        attempt(problems, read_metric, text) for text in curriculum.curriculum_metrics
    ]
    yield from problems
    names = [metric.name for metric in metrics if metric]
    if len(set(names)) < len(names):
        yield f"two curriculum metrics are named {max(names, key=names.count)}. Remove or rename one."
    if curriculum.curriculum_cluster_path is not None and len(names) == 1:
        yield (
            "[curriculum_cluster_path] is for the clusters of several metrics; one metric needs none. "
            "Remove it."
        )
    # The curriculum sets the order, and needs an analysis of the corpus.
    if data.dataloader_type != "single":
        yield (
            "[dataloader_type] with curriculum metrics: the curriculum sets the order of the samples. Use "
            "--dataloader-type single."
        )
    if data.mock_data:
        yield (
            "[mock_data] with curriculum metrics: random samples have no analysis to order them by. Use "
            "--data-path."
        )
    words = data.train_data_path or data.data_path
    if len(words) > 1 and is_number(words[0]):
        yield (
            "curriculum metrics number the samples of one epoch, and a weighted blend has no epochs. Give "
            "the corpora without weights."
        )


def folding(config: RunConfig) -> Iterator[str]:
    """Only samples of a GPT can be folded into shorter rows."""
    kind = config.of(CurriculumConfig).curriculum_type
    if kind == RESHAPE and config.model.model not in (
        None,
        "gpt",
    ):
        yield (
            f"[curriculum_type] cuts a sample at any token, but a sample of {config.model.model} cannot "
            "be cut. Use seqlen_truncate."
        )


def kept_tokens(config: RunConfig) -> Iterator[str]:
    """The number of kept tokens begins above 0 and grows to at most the sequence length."""
    # Options that random-LTD needs.
    ltd = config.of(RandomLTDConfig)
    length = config.model.seq_length
    if not ltd.random_ltd:
        return
    for path in ("random_ltd.random_ltd_min_tokens", "random_ltd.random_ltd_steps"):
        if config.get(path) is None:
            yield f"[random_ltd] needs {flag(path)}: {all_options()[path].help}"
    # The number rises from the least to the most.
    least = ltd.random_ltd_min_tokens
    multiple = ltd.random_ltd_tokens_per_step
    most = ltd.random_ltd_max_tokens or length
    if length and most and most > length:
        yield (
            f"[random_ltd_max_tokens] is more than [seq_length]. Use {length} or less, or remove it to "
            "keep all tokens at the end."
        )
    if least and most and least > most:
        yield (
            f"[random_ltd_min_tokens] is more than the {most} tokens kept at the end, but the number only "
            f"grows. Use --random-ltd-min-tokens {most} or less."
        )
    elif least and least < multiple and least != most:
        yield (
            "[random_ltd_min_tokens] is less than [random_ltd_tokens_per_step]: rounded down to a "
            f"multiple of {multiple}, no token would be kept at first. Use --random-ltd-min-tokens "
            f"{multiple} or more, or --random-ltd-tokens-per-step {least} or less."
        )


def dropping_blocks(config: RunConfig) -> Iterator[str]:
    """The blocks that drop tokens exist, once each."""
    ltd = config.of(RandomLTDConfig)
    layers = config.model.num_layers
    if not ltd.random_ltd or not layers:
        return
    ids = ltd.random_ltd_layer_ids
    total = ltd.random_ltd_total_layers
    if total is not None and total != layers:
        yield (
            "[random_ltd_total_layers], but [num_layers]. Make them equal, or remove "
            "--random-ltd-total-layers."
        )
    outside = sorted({i for i in ids if i >= layers})
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if outside:
        yield (
            f"[random_ltd_layer_ids]: there is no block {', '.join(map(str, outside))} among {layers}, "
            f"numbered from 0. Use numbers up to {layers - 1}."
        )
    if twice:
        yield f"[random_ltd_layer_ids] contains {', '.join(map(str, twice))} twice. Give each block once."
    if not ltd.dropping_blocks(layers):
        yield (
            "[random_ltd] with [num_layers]: no block remains besides the first and the last to drop "
            "tokens. Choose blocks with --random-ltd-layer-ids."
        )


def divided_tokens(config: RunConfig) -> Iterator[str]:
    """Ranks that share a sequence divide the number of kept tokens."""
    ltd = config.of(RandomLTDConfig)
    t = config.sequence_parts
    length = config.model.seq_length
    if not ltd.random_ltd or t == 1 or not length:
        return
    most = ltd.random_ltd_max_tokens or length
    multiple = ltd.random_ltd_tokens_per_step
    why = f"{t}: {_sharing(config)} hold equal parts of the kept tokens"
    if multiple % t and ltd.random_ltd_min_tokens != most:
        yield (
            f"[random_ltd_tokens_per_step] is not a multiple of {why}. Use --random-ltd-tokens-per-step "
            f"{neighbours(multiple, t)}."
        )
    if most < length and most % t:
        yield (
            f"[random_ltd_max_tokens] is not a multiple of {why}. Use --random-ltd-max-tokens "
            f"{neighbours(most, t)}."
        )
