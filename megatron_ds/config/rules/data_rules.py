"""Rules about the data (its source, the samples made of it) and data efficiency (curricula, random-LTD)."""

import re
from collections.abc import Iterator, Sequence

from ...progress.difficulty import Difficulty
from ..messages import flag, given, neighbours
from ..options.data_efficiency_options import RESHAPE, length_difficulty, read_metric
from ..run import RunConfig, all_options
from ..sources.reading import attempt

SHORTEST = 8  # [CLS] A [SEP] B [SEP] with a few tokens in each segment
SPLIT_PATHS = ("data.train_data_path", "data.valid_data_path", "data.test_data_path")
OF_GPT = (
    "data.eod_mask_loss",
    "data.reset_position_ids",
    "data.reset_attention_mask",
    "data.fim_data",
    "data.pack_documents",
)
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


def corpus(config: RunConfig) -> Iterator[str]:
    """The data come from one source, with a tokenizer; splits and blend weights match that source."""
    # One source.
    data = config.data
    paths = [path for path in SPLIT_PATHS if config.get(path)]
    sources = (
        "data.mock_data",
        "data.data_path",
        *paths[:1],
        "data.data_args_path",
        "data.per_split_data_args_path",
    )
    chosen = [f"[{path}]" for path in sources if config.get(path)]
    if not chosen and not config.plan.is_dry:  # a plan can come before its data
        yield (
            "missing: the data. Give --data-path PREFIX, or --train-data-path and so on for each split, "
            "or --mock-data to train on random tokens."
        )
    elif len(chosen) > 1:
        how_many = "both" if len(chosen) == 2 else "all"
        hint = "; --mock-data on the command line replaces the others"
        yield (
            f"{' and '.join(chosen)} {how_many} choose the training data. "
            f"Give only one{hint if data.mock_data else ''}."
        )
    # Parts of the source.
    if data.split is not None and not data.is_divided_by_split:
        why = (
            "each split has its own path"
            if paths or data.per_split_data_args_path
            else "there is none"
        )
        yield f"[split] divides the corpora of --data-path, but {why}. Remove it."
    elif data.split is not None and not _is_split(data.split):
        yield (
            "[split] is not a list of up to three proportions, none negative and not all zero. Use for "
            "instance 969,30,1, or 98,2,0 for no test set."
        )
    if paths and not data.train_data_path:
        yield f"[{paths[0]}] without --train-data-path: there is no training data. Add --train-data-path."
    # Weights of a blend.
    words = next(filter(None, (data.data_path, data.train_data_path)), ())
    if data.blend_weights == "epochs" and (data.mock_data or _has_no_weights(words)):
        yield (
            "[blend_weights] needs a weight before each prefix: the number of epochs of that corpus. Add "
            "the weights."
        )
    # The tokenizer.
    if chosen and not data.mock_data and data.tokenizer_type is None:
        yield (
            "missing: --tokenizer-type, the tokenizer that the corpus was tokenized with (NullTokenizer "
            "for bare ids)."
        )
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        yield "missing: --vocab-size. [tokenizer_type] has no vocabulary file to read it from."


def _has_no_weights(words: Sequence[str]) -> bool:
    """Whether a data path is prefixes alone. False for a file, which is read when the data are opened."""
    return bool(words) and not words[0].startswith("@") and not is_number(words[0])


def is_number(text: str) -> bool:
    """Whether a word of --data-path is a weight rather than a prefix."""
    try:
        return float(text) is not None
    except ValueError:
        return False


def _is_split(text: str) -> bool:
    """Up to three numbers between commas, blanks or slashes; as `data/split.py` reads them."""
    numbers = re.split(r"[\s,/]+", text.strip(" ,/"))
    return (
        len(numbers) <= 3
        and all(re.fullmatch(r"\d+\.?\d*|\.\d+", n) for n in numbers)
        and any(float(n) for n in numbers)
    )


def fill_in_the_middle(config: RunConfig) -> Iterator[str]:
    """The other --fim options need --fim-data, and --fim-data needs documents."""
    data = config.data
    if data.fim_data and data.mock_data:
        yield "--fim-data with --mock-data: random tokens have no text to rearrange. Remove one of the two."


def packing(config: RunConfig) -> Iterator[str]:
    """--pack-documents excludes --mock-data, which has no documents, and --fim-data, which changes them."""
    data = config.data
    if data.pack_documents and data.mock_data:
        yield (
            "--pack-documents with --mock-data: random samples have no documents to pack. Remove one of "
            "the two."
        )
    if data.pack_documents and data.fim_data:
        yield (
            "--pack-documents with --fim-data: packed samples have no room for the special tokens. Remove "
            "one of the two; --reset-attention-mask also separates documents."
        )


def not_for_bert(config: RunConfig) -> Iterator[str]:
    """A sample of BERT is a pair of segments of one document, without a causal mask."""
    if config.model.model != "bert":
        return
    yield from given(
        config,
        OF_GPT,
        "applies to samples of several documents, but a sample of BERT is from "
        "one document. Remove it.",
    )
    if config.model.position_embedding_type == "none":
        yield (
            "[position_embedding_type]: BERT has no causal mask, so without position embeddings the order "
            "of tokens would be lost. Use --position-embedding-type learned_absolute, rope, yarn or "
            "alibi."
        )
    if config.model.seq_length and config.model.seq_length < SHORTEST:
        yield f"[seq_length] leaves no room for [CLS] A [SEP] B [SEP]. Use --seq-length {SHORTEST} or more."


def lengths(config: RunConfig) -> Iterator[str]:
    """A curriculum over lengths has the options of its schedule, and lengths that the ranks can split."""
    # Options need a curriculum.
    curriculum = config.curriculum
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
    curriculum = config.curriculum
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
    if config.curriculum.curriculum_type == RESHAPE and config.model.model not in (
        None,
        "gpt",
    ):
        yield (
            f"[curriculum_type] cuts a sample at any token, but a sample of {config.model.model} cannot "
            "be cut. Use seqlen_truncate."
        )


def random_ltd_is_on(config: RunConfig) -> Iterator[str]:
    """The options of random-LTD have no effect without --random-ltd."""
    if not config.random_ltd.random_ltd:
        yield from given(
            config,
            [path for path in all_options() if path.startswith("random_ltd.")],
            "has no effect without --random-ltd. Add --random-ltd, or remove it.",
        )


def kept_tokens(config: RunConfig) -> Iterator[str]:
    """The number of kept tokens begins above 0 and grows to at most the sequence length."""
    # Options that random-LTD needs.
    ltd = config.random_ltd
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
    ltd = config.random_ltd
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
    ltd = config.random_ltd
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


DATA_RULES = (
    corpus,
    fill_in_the_middle,
    packing,
    not_for_bert,
    lengths,
    samples,
    folding,
    random_ltd_is_on,
    kept_tokens,
    dropping_blocks,
    divided_tokens,
)
