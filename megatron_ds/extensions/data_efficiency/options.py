"""DeepSpeed's data efficiency: `CurriculumConfig` (short sequences or easy samples first) and
`RandomLTDConfig`.

A curriculum over lengths (`--curriculum-type`) is given with flags or with the legacy block
"curriculum_learning". A curriculum over samples has a block for each metric, as in "data_efficiency"; each
block is kept as a JSON string.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...config.options.need import need
from ...config.options.option import option
from ...errors import ConfigError
from ...progress.kept_tokens import KeptTokens
from .difficulty import KINDS, Custom, Difficulty, Rise, make_difficulty

# DeepSpeed's names of such metrics
TRUNCATE = "seqlen_truncate"
RESHAPE = "seqlen_reshape"
SCHEDULE = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
METRIC_KEYS = {
    "name",
    "index_to_sample_path",
    "index_to_metric_path",
    "difficulty_type",
    "clustering_type",
    *SCHEDULE,
}
_LTD = "data_efficiency.data_routing.random_ltd"
PATHS = ("index_to_sample_path", "index_to_metric_path")
CLUSTERINGS = ("schedule_based", "single_cluster")


@dataclass(frozen=True)
class CurriculumConfig:
    """Off unless --curriculum-type or --curriculum-metrics is given; both may be."""

    curriculum_type: str | None = option(
        None,
        choices=(TRUNCATE, RESHAPE),
        values={"seqlen": TRUNCATE},
        help="Train on short sequences first: seqlen_truncate drops the rest of each sample, seqlen_reshape "
        "folds it into more rows.",
        avoid="Truncation needs more samples for the same tokens. Evaluation is always at full length.",
    )
    curriculum_schedule: str = option(
        "fixed_linear", choices=tuple(KINDS), help="How the length grows."
    )
    curriculum_min_length: int | None = option(
        None, at_least=1, unit="tokens", help="Length of the first step."
    )
    curriculum_max_length: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        help="Length at the end of the curriculum. Default: --seq-length.",
    )
    curriculum_steps: int | None = option(
        None,
        at_least=1,
        unit="steps",
        help="Steps until the largest length is reached (fixed_linear, fixed_root).",
    )
    curriculum_length_step: int = option(
        8,
        at_least=1,
        unit="tokens",
        help="The length is a multiple of this (fixed_linear, fixed_root).",
        avoid="Multiples of 8 are fast on GPUs; each new length costs some memory and a search for kernels.",
    )
    curriculum_root_degree: float | None = option(
        None,
        above=0,
        help="Degree of the root: with 2 the length grows with the square root of the steps (fixed_root).",
    )
    curriculum_lengths: tuple[int, ...] = option(
        (), at_least=1, unit="tokens", help="The lengths, in order (fixed_discrete)."
    )
    curriculum_until_steps: tuple[int, ...] = option(
        (),
        at_least=1,
        unit="steps",
        help="The last step of each length except the last (fixed_discrete).",
    )
    curriculum_function: str | None = option(
        None,
        help="package.module:function from the step, counted from 1, to the length (custom).",
        avoid="If it depends on anything else, a resumed run differs.",
    )
    curriculum_metrics: tuple[str, ...] = option(
        (),
        help='Easy samples first: for each metric, a block of "curriculum_metrics" with its "name" '
        "inside, as JSON text. Easier to write in a DeepSpeed JSON.",
        avoid="It needs an analysis by megatron-ds analyze.",
    )
    curriculum_cluster_path: str | None = option(
        None,
        per_host=True,
        help="Directory for the samples that several metrics admit. Default: --data-cache-path, or next to "
        "the first index.",
    )
    data_efficiency_seed: int = option(
        1234, at_least=0, help="Seed of the order in which a curriculum draws samples."
    )

    @property
    def changes_lengths(self) -> bool:
        """Whether sequences are shorter than samples in some steps."""
        return self.curriculum_type is not None

    @property
    def orders_samples(self) -> bool:
        """Whether there is an order of the samples of one epoch."""
        return bool(self.curriculum_metrics)

    @property
    def longest_stated(self) -> int:
        """The longest length that options name, which a sample must have."""
        return max(self.curriculum_min_length or 0, self.curriculum_max_length or 0)

    def lengths(self, seq_length: int) -> "LengthCurriculum | None":
        """Return the lengths of --curriculum-type. Raises ConfigError with the flags that are wrong."""
        if self.curriculum_type is None:
            return None
        return LengthCurriculum(
            length_difficulty(self, seq_length), self.curriculum_type == RESHAPE
        )

    def identity(self) -> dict[str, Any]:
        """Return the order of the samples, if there is one."""
        return {"curriculum": order_identity(self)} if self.orders_samples else {}

    def index_prefixes(self) -> Iterator[tuple[str, str]]:
        """Yield (description, prefix) of the index files that the order is made from."""
        for text in self.curriculum_metrics:
            block = json.loads(text)
            for key in block:
                if key.endswith("_path"):
                    yield f"{key} of curriculum metric {block.get('name')}", block[key]

    @property
    def length_settings(self) -> dict[str, Any]:
        """The curriculum over lengths as a block of DeepSpeed's JSON, without keys that have no value."""
        _, needed, _ = KINDS[self.curriculum_schedule]
        schedule = _given(
            {
                "total_curriculum_step": self.curriculum_steps,
                "root_degree": self.curriculum_root_degree,
                "difficulty": list(self.curriculum_lengths) or None,
                "max_step": list(self.curriculum_until_steps) or None,
                "function": self.curriculum_function,
                "difficulty_step": self.curriculum_length_step
                if "difficulty_step" in needed
                else None,
            }
        )
        return _given(
            {
                "min_difficulty": self.curriculum_min_length,
                "max_difficulty": self.curriculum_max_length,
                "schedule_type": self.curriculum_schedule,
                "schedule_config": schedule,
            }
        )


def _given(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if value is not None}


@dataclass(frozen=True)
class RandomLTDConfig:
    """Random layer-wise token dropping: blocks process a growing subset of the tokens."""

    random_ltd: bool = option(
        False,
        help="Let some blocks process only a random subset of the tokens, which grows during training "
        "(random-LTD).",
        avoid="It changes what is trained. Compare losses on a small run first.",
    )
    random_ltd_total_layers: int | None = option(
        None,
        at_least=1,
        json=f"{_LTD}.total_layer_num",
        needs=need("random_ltd.random_ltd"),
        help="Require this number of blocks: any other number of layers is an error.",
        avoid="Not needed: the number is known from the model.",
    )
    random_ltd_layer_ids: tuple[int, ...] = option(
        (),
        at_least=0,
        json=f"{_LTD}.random_ltd_layer_id",
        needs=need("random_ltd.random_ltd"),
        help="Numbers of the blocks that drop tokens, from 0. Default: all except the first and the last.",
    )
    random_ltd_min_tokens: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        json=f"{_LTD}.random_ltd_schedule.min_value",
        needs=need("random_ltd.random_ltd"),
        help="Tokens of each sequence that these blocks keep in the first step.",
    )
    random_ltd_max_tokens: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        json=f"{_LTD}.random_ltd_schedule.max_value",
        needs=need("random_ltd.random_ltd"),
        help="Tokens of each sequence that these blocks keep at the end. Default: the sequence length.",
        avoid="With fewer, the run never trains on the whole sequences that it is evaluated on.",
    )
    random_ltd_steps: int | None = option(
        None,
        at_least=1,
        unit="steps",
        json=f"{_LTD}.random_ltd_schedule.schedule_config.require_steps",
        needs=need("random_ltd.random_ltd"),
        help="Steps over which the number of kept tokens grows linearly. Two thirds of the run is a good "
        "starting point.",
    )
    random_ltd_tokens_per_step: int = option(
        16,
        at_least=1,
        unit="tokens",
        json=f"{_LTD}.random_ltd_schedule.schedule_config.seq_per_step",
        needs=need("random_ltd.random_ltd"),
        help="The number of kept tokens is rounded down to a multiple of this.",
        avoid="Kernels are fastest with multiples of 64 on GPUs, of 8 on CPUs.",
    )

    @property
    def longest_stated(self) -> int:
        """The largest number of tokens that options name, which a sequence must have."""
        return max(self.random_ltd_min_tokens or 0, self.random_ltd_max_tokens or 0)

    def kept_tokens(self, num_blocks: int, seq_length: int) -> KeptTokens | None:
        """Return the blocks and their tokens; None without --random-ltd."""
        least = self.random_ltd_min_tokens
        steps = self.random_ltd_steps
        # Rules require the two.
        if not self.random_ltd or least is None or steps is None:
            return None
        # lowest=0: DeepSpeed rounds down below the minimum if that is not a multiple, and the integers are to
        # be equal.
        kept = Rise(
            least,
            self.random_ltd_max_tokens or seq_length,
            steps,
            self.random_ltd_tokens_per_step,
            lowest=0,
        )
        return KeptTokens(
            self.dropping_blocks(num_blocks),
            num_blocks,
            kept,
            title="random ltd reserved length",
        )

    def dropping_blocks(self, num_layers: int) -> tuple[int, ...]:
        """Numbers of the blocks that drop tokens; by default all but the first and the last."""
        return tuple(sorted(self.random_ltd_layer_ids)) or tuple(
            range(1, num_layers - 1)
        )


@dataclass(frozen=True)
class LengthCurriculum:
    """The `SequenceLengths` of a curriculum. folds: a sample becomes several rows."""

    difficulty: Difficulty
    folds: bool

    def at(self, step: int) -> int:
        """Return the length of a step, counted from 1."""
        return self.difficulty.at(step)

    def is_settled(self, step: int) -> bool:
        """Return whether the largest length is reached. Nothing is known of a function of the user."""
        is_known = not isinstance(self.difficulty, Custom)
        return is_known and self.at(step) == self.difficulty.maximum

    def rows(self, whole: int, length: int) -> int:
        """Rows that a sample of `whole` tokens becomes."""
        return whole // length if self.folds else 1


@dataclass(frozen=True)
class Metric:
    """A metric that orders samples, with the prefixes of its .bin/.idx pairs."""

    name: str
    index_to_sample_path: str
    index_to_metric_path: str | None
    difficulty_type: str
    difficulty: Difficulty


def length_difficulty(curriculum: CurriculumConfig, seq_length: int) -> Difficulty:
    """Return the sequence length as a function of the step. Raises ConfigError with the flags that are wrong."""
    settings = {"max_difficulty": seq_length, **curriculum.length_settings}
    if curriculum.curriculum_schedule == "fixed_discrete":
        settings.setdefault(
            "min_difficulty", min(curriculum.curriculum_lengths, default=1)
        )
    if curriculum.curriculum_schedule == "custom":
        settings.setdefault("min_difficulty", 1)
    try:
        return make_difficulty(settings, "the curriculum over lengths")
    except ConfigError as error:
        raise ConfigError(_in_flags(str(error))) from None


def read_metric(text: str) -> Metric:
    """Return a metric from its JSON string. Raises ConfigError with the metric and the key that is wrong."""
    # The block and its keys.
    try:
        block = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--curriculum-metrics {text!r} is not JSON: {error}."
        ) from None
    if (
        not isinstance(block, Mapping)
        or not isinstance(block.get("name"), str)
        or not block["name"]
    ):
        raise ConfigError(
            f'--curriculum-metrics {text!r}: give a block {{ … }} with the metric\'s "name" '
            "and DeepSpeed's keys for it."
        )
    where = f"curriculum metric {block['name']}"
    if unknown := sorted(block.keys() - METRIC_KEYS):
        raise ConfigError(
            f"{where}: unknown {', '.join(unknown)}. Known: {', '.join(sorted(METRIC_KEYS))}."
        )
    # How samples are chosen.
    if block.get("clustering_type") not in CLUSTERINGS:
        raise ConfigError(
            f"{where}: clustering_type is {block.get('clustering_type')!r}; it must be "
            "schedule_based."
        )
    if block["clustering_type"] == "single_cluster":
        raise ConfigError(
            f"{where}: with clustering_type single_cluster it would select no samples and have "
            f"no effect. Use schedule_based; only {TRUNCATE} and {RESHAPE} work without it."
        )
    kind = block.get("difficulty_type")
    if kind not in ("value", "percentile"):
        raise ConfigError(
            f"{where}: difficulty_type is {kind!r}; it must be value or percentile."
        )
    # The files of the analysis; percentiles do not read the values.
    for key in PATHS:
        path = block.get(key)
        if not (isinstance(path, str) and path) and (
            key == "index_to_sample_path" or kind == "value"
        ):
            raise ConfigError(
                f"{where}: {key} is {path!r}; give the prefix of a .bin/.idx pair that "
                "megatron-ds analyze wrote."
            )
    # The schedule.
    difficulty = make_difficulty(block, where)
    if kind == "percentile" and block["min_difficulty"] < 1:
        raise ConfigError(
            f"{where}: min_difficulty {block['min_difficulty']} of {block['max_difficulty']} "
            "percentiles admits no sample. Use 1 or more."
        )
    sample_path, metric_path = map(block.get, PATHS)
    assert isinstance(sample_path, str)  # checked above
    return Metric(block["name"], sample_path, metric_path, kind, difficulty)


def order_identity(curriculum: CurriculumConfig) -> list[Any]:
    """Return the values that decide the order of samples, without paths: files may move."""
    blocks = [json.loads(text) for text in curriculum.curriculum_metrics]
    return [
        {key: value for key, value in block.items() if not key.endswith("_path")}
        for block in blocks
    ] + [curriculum.data_efficiency_seed]


# Key of DeepSpeed's JSON in a message → the flag that sets it.
_FLAGS_OF_KEYS = {
    "min_difficulty": "--curriculum-min-length",
    "max_difficulty": "--curriculum-max-length",
    "total_curriculum_step": "--curriculum-steps",
    "difficulty_step": "--curriculum-length-step",
    "root_degree": "--curriculum-root-degree",
    "max_step": "--curriculum-until-steps",
    "schedule_config of ": "--curriculum-schedule ",
    " function": " --curriculum-function",
    " difficulty": " --curriculum-lengths",
}


def _in_flags(message: str) -> str:
    for key, flag in _FLAGS_OF_KEYS.items():
        message = message.replace(key, flag)
    return message
