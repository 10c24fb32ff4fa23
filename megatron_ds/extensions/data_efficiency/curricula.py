"""What the options of curricula mean: lengths of the steps, and metrics that order samples."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from .difficulty import KINDS, Custom, Difficulty, make_difficulty
from .options import RESHAPE, TRUNCATE, CurriculumConfig

SCHEDULE = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
METRIC_KEYS = {
    "name",
    "index_to_sample_path",
    "index_to_metric_path",
    "difficulty_type",
    "clustering_type",
    *SCHEDULE,
}
PATHS = ("index_to_sample_path", "index_to_metric_path")
CLUSTERINGS = ("schedule_based", "single_cluster")
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
    settings = {"max_difficulty": seq_length, **length_settings(curriculum)}
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


def _in_flags(message: str) -> str:
    for key, flag in _FLAGS_OF_KEYS.items():
        message = message.replace(key, flag)
    return message


def lengths_of(
    curriculum: CurriculumConfig, seq_length: int
) -> LengthCurriculum | None:
    """Return the lengths of --curriculum-type. Raises ConfigError with the flags that are wrong."""
    if curriculum.curriculum_type is None:
        return None
    return LengthCurriculum(
        length_difficulty(curriculum, seq_length), curriculum.curriculum_type == RESHAPE
    )


def identity_of(curriculum: CurriculumConfig) -> dict[str, Any]:
    """Return the order of the samples, if there is one."""
    return (
        {"curriculum": order_identity(curriculum)} if curriculum.orders_samples else {}
    )


def index_prefixes(curriculum: CurriculumConfig) -> Iterator[tuple[str, str]]:
    """Yield (description, prefix) of the index files that the order is made from."""
    for text in curriculum.curriculum_metrics:
        block = json.loads(text)
        for key in block:
            if key.endswith("_path"):
                yield f"{key} of curriculum metric {block.get('name')}", block[key]


def length_settings(curriculum: CurriculumConfig) -> dict[str, Any]:
    """The curriculum over lengths as a block of DeepSpeed's JSON, without keys that have no value."""
    _, needed, _ = KINDS[curriculum.curriculum_schedule]
    schedule = _given(
        {
            "total_curriculum_step": curriculum.curriculum_steps,
            "root_degree": curriculum.curriculum_root_degree,
            "difficulty": list(curriculum.curriculum_lengths) or None,
            "max_step": list(curriculum.curriculum_until_steps) or None,
            "function": curriculum.curriculum_function,
            "difficulty_step": curriculum.curriculum_length_step
            if "difficulty_step" in needed
            else None,
        }
    )
    return _given(
        {
            "min_difficulty": curriculum.curriculum_min_length,
            "max_difficulty": curriculum.curriculum_max_length,
            "schedule_type": curriculum.curriculum_schedule,
            "schedule_config": schedule,
        }
    )


def _given(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if value is not None}
