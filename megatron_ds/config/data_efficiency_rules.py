"""Rules about curricula: their own options, and the options that they work with."""

from collections.abc import Iterator

from .data_efficiency_options import RESHAPE, length_difficulty, read_metric
from .messages import say
from .problems import attempt
from .run import RunConfig, all_options

LENGTH_OPTIONS = ("schedule", "min_length", "max_length", "steps", "length_step", "root_degree", "lengths", "until_steps",
                  "function")
USED_BY = {"steps": ("fixed_linear", "fixed_root"), "length_step": ("fixed_linear", "fixed_root"),
           "root_degree": ("fixed_root",), "lengths": ("fixed_discrete",), "until_steps": ("fixed_discrete",),
           "function": ("custom",)}


def lengths(config: RunConfig) -> Iterator[str]:
    curriculum, whole = config.curriculum, config.model.seq_length
    given = [name for name in LENGTH_OPTIONS if _is_given(config, f"curriculum.curriculum_{name}")]
    if curriculum.curriculum_type is None:
        if given:
            yield (f"{say(config, f'curriculum.curriculum_{given[0]}')} has no effect without --curriculum-type. Add "
                   "--curriculum-type seqlen_truncate or seqlen_reshape, or remove it.")
        return
    if whole is None:
        return
    kind, longest = curriculum.curriculum_schedule, curriculum.curriculum_max_length
    for name in given:
        if kind not in USED_BY.get(name, (kind,)):
            yield (f"{say(config, f'curriculum.curriculum_{name}')} has no effect with --curriculum-schedule {kind}. "
                   "Remove it, "
                   f"or use {' or '.join(USED_BY[name])}.")
            return
    if longest is not None and longest > whole:
        yield (f"{say(config, 'curriculum.curriculum_max_length')} is longer than {say(config, 'model.seq_length')}, the "
               "length of a sample. Use that or less.")
        return
    problems: list[str] = []
    difficulty = attempt(problems, length_difficulty, curriculum, whole)
    yield from problems
    if difficulty is not None:
        yield from _split_by_tensor_ranks(config, difficulty)


def _split_by_tensor_ranks(config: RunConfig, difficulty) -> Iterator[str]:
    tp, train = config.parallel.tensor_model_parallel_size, config.train
    samples = train.train_samples or (train.train_tokens or 0) // max(1, getattr(difficulty, "minimum", 1))
    steps = train.train_iters or samples // (train.global_batch_size or 1)
    if not (config.parallel.sequence_parallel and tp > 1):
        return
    problems: list[str] = []
    odd = attempt(problems, lambda: _length_not_divided(difficulty, steps, tp))
    yield from problems
    if odd is not None:
        yield (f"the curriculum has a length of {odd}, which {say(config, 'parallel.sequence_parallel')} cannot split "
               f"over {tp} tensor-parallel ranks. Use lengths, and a --curriculum-length-step, that are multiples of {tp}.")


def _length_not_divided(difficulty, steps: int, tp: int) -> int | None:
    for step in range(1, steps + 1):
        length = difficulty.at(step)
        if length % tp:
            return length
        if length == difficulty.maximum:
            return None
    return None


def samples(config: RunConfig) -> Iterator[str]:
    curriculum, data = config.curriculum, config.data
    if not curriculum.curriculum_metrics:
        if curriculum.curriculum_cluster_path is not None:
            yield (f"{say(config, 'curriculum.curriculum_cluster_path')} has no effect without metrics. Add a "
                   "\"curriculum_metrics\" block, or remove it.")
        return
    problems: list[str] = []
    metrics = [attempt(problems, read_metric, text) for text in curriculum.curriculum_metrics]
    yield from problems
    names = [metric.name for metric in metrics if metric]
    if len(set(names)) < len(names):
        yield f"two curriculum metrics are named {max(names, key=names.count)}. Keep one."
    if curriculum.curriculum_cluster_path is not None and len(names) == 1:
        yield (f"{say(config, 'curriculum.curriculum_cluster_path')} is for the clusters of several metrics; one metric needs "
               "none. Remove it.")
    if data.dataloader_type != "single":
        yield (f"{say(config, 'data.dataloader_type')} with curriculum metrics: the curriculum sets the order of the samples. "
               "Use --dataloader-type single.")
    if data.mock_data:
        yield f"{say(config, 'data.mock_data')} with curriculum metrics: random samples have no analysis. Use --data-path."
    words = data.train_data_path or data.data_path
    if len(words) > 1 and _is_number(words[0]):
        yield ("curriculum metrics number the samples of one epoch, and a weighted blend has no epochs. Give the "
               "corpora without "
               "weights.")


def folding(config: RunConfig) -> Iterator[str]:
    if config.curriculum.curriculum_type == RESHAPE and config.model.model not in (None, "gpt"):
        yield (f"{say(config, 'curriculum.curriculum_type')} cuts a sample at any token, but a sample of {config.model.model} "
               "cannot be cut. Use seqlen_truncate.")


def _is_given(config: RunConfig, path: str) -> bool:
    return config.get(path) != all_options()[path].default


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


CURRICULUM_RULES = (lengths, samples, folding)
