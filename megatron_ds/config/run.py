"""`RunConfig`: the whole configuration of one run, frozen, with the source of every value.

The layers below `training` receive numbers and groups, not the whole configuration.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import lcm
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar

from ..errors import ConfigError
from ..features import (
    Feature,
    Lengths,
    Objective,
    features,
    objectives,
    per_features,
    the_one,
)
from ..mpu.grid import Grid
from ..progress.kept_tokens import KeptTokens
from ..progress.sequence_lengths import SequenceLengths
from .added_weights import AddedWeights
from .model_facts import facts_of_model
from .options.cycle import CycleConfig
from .options.data import DataConfig
from .options.logging import LoggingConfig
from .options.model import ModelConfig
from .options.option import Option, options_of
from .options.parallel import ParallelConfig, ZeroConfig
from .options.training import (
    CheckpointConfig,
    OptimizerConfig,
    PlanConfig,
    TrainConfig,
)
from .sample_order import SampleOrder

S = TypeVar("S")

RUN = "run"  # kind of a source: the run.json of a checkpoint


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a value; a default has none. kind: "script", "yaml", RUN, "deepspeed", "flag" or "derived"."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class RunConfig:
    """One dataclass per section, all values of their final types.

    more            name → section of each feature that has options (`of` finds one by its class)
    sources         path of each value that is not the default of its declaration ("train.seed") → its
                    `Source`
    without_effect  flag or key that was accepted although it changes nothing, as written → the reason;
                    startup prints these
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    cycle: CycleConfig = field(default_factory=CycleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    more: tuple[tuple[str, Any], ...] = field(
        default_factory=lambda: tuple((name, cls()) for name, cls in _added().items())
    )
    world_size: int = 1
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)
    without_effect: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def objective(self) -> Objective | None:
        """What the run is trained for in place of the model's own loss; None for that loss."""
        return next(iter(objectives(self).values()), None)

    @property
    def added_weights(self) -> AddedWeights | None:
        """The weights that are trained beside frozen ones; None where the model's own are trained."""
        return the_one(lambda feature: feature.added, self)

    @property
    def sample_order(self) -> SampleOrder | None:
        """The order of the samples of one epoch; None for that of --dataloader-type."""
        return the_one(lambda feature: feature.order, self)

    @property
    def kept_tokens(self) -> KeptTokens | None:
        """The tokens that some blocks keep of each sequence; None: all."""
        return the_one(lambda feature: feature.kept, self)

    @property
    def changed_lengths(self) -> Lengths | None:
        """What shortens the sequences of some steps; None where samples are whole."""
        return the_one(_lengths_of, self)

    @property
    def sequence_lengths(self) -> SequenceLengths | None:
        """The lengths of the sequences; None where samples are whole. Raises ConfigError."""
        changed = self.changed_lengths
        return None if changed is None else changed.make(self)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that process different samples. The world size must be divisible by the other sizes."""
        return self.world_size // self.parallel.model_parallel_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        return self.model.padded_vocab_size(self.parallel.tensor_model_parallel_size)

    def grid(self, world_size: int | None = None) -> Grid:
        """Return the grid of the ranks. Raises ConfigError if the sizes of the axes do not divide their number."""
        p = self.parallel
        # Without experts the size of theirs has no effect.
        etp = p.expert_tensor_parallel_size if self.model.num_experts else None
        return Grid.fit(
            self.world_size if world_size is None else world_size,
            tp=p.tensor_model_parallel_size,
            cp=p.context_parallel_size,
            ep=p.expert_model_parallel_size,
            pp=p.pipeline_model_parallel_size,
            order=p.rank_order,
            etp=etp or 0,
        )

    @property
    def is_zigzag(self) -> bool:
        """Whether context-parallel ranks hold two chunks of a sequence instead of one: where queries attend
        to keys of other ranks, and later tokens see more keys than earlier ones."""
        return facts_of_model(self.model.model).is_causal and set(
            self.parallel.cp_comm_type
        ) != {"a2a"}

    @property
    def sequence_parts(self) -> int:
        """Return the number of which a sequence, or the part of it that is kept, must be a multiple."""
        parallel = self.parallel
        c = self.parallel.context_parallel_size
        t = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        return lcm(c * (1 + (self.is_zigzag and c > 1)), c * t)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step at the full global batch."""
        return self.microbatches(self.train.global_batch_size)

    def microbatches(self, global_batch_size: int) -> int:
        """Return the micro-batches of a step of this size, on each data-parallel rank."""
        return global_batch_size // (
            self.train.micro_batch_size * self.data_parallel_size
        )

    @property
    def pipeline_chunks(self) -> int | None:
        """Stages on each pipeline rank, if an option sets their number."""
        p = self.parallel
        if (
            p.num_virtual_stages_per_pipeline_rank
            or not p.num_layers_per_virtual_pipeline_stage
        ):
            return p.num_virtual_stages_per_pipeline_rank
        layers = self.model.num_layers or 0
        return (
            layers
            // (
                p.pipeline_model_parallel_size * p.num_layers_per_virtual_pipeline_stage
            )
            or None
        )

    def section(self, name: str) -> Any:
        """Return a section by its name. Raises ConfigError as `of` does."""
        return self.of(_added()[name]) if name in _added() else getattr(self, name)

    def of(self, options: type[S]) -> S:
        """Return the section of a feature by its dataclass.

        Raises ConfigError if the feature was not loaded when this configuration was made.
        """
        for _, section in self.more:
            if isinstance(section, options):
                return section
        raise ConfigError(
            f"the configuration has no section {options.__name__}: its feature was not loaded when the options were "
            "read. Name its module with --import."
        )

    def get(self, path: str) -> Any:
        """Return the value of `section.field`."""
        section, name = path.split(".")
        return getattr(self.section(section), name)

    def is_default(self, path: str) -> bool:
        """Return whether the option has its default value, from whatever source."""
        return self.get(path) == all_options()[path].default

    def source(self, path: str) -> str:
        """Return the source of a value, for messages: "--lr", "gpt.yaml:12", or "default"."""
        return str(self.sources.get(path, "default"))

    def with_values(self, values: Mapping[str, Any], source: Source) -> "RunConfig":
        """Return a copy with other values for some paths, all from one source."""
        others: dict[str, dict[str, Any]] = {}
        for path, value in values.items():
            section, name = path.split(".")
            others.setdefault(section, {})[name] = value
        # Sections without another value are shared.
        changed = {section: self.section(section) for section in sections()}
        for section, its_values in others.items():
            changed[section] = replace(changed[section], **its_values)
        return replace(
            self,
            **by_field(changed),
            sources={**self.sources, **dict.fromkeys(values, source)},
        )

    def with_notes(self, notes: Mapping[str, str]) -> "RunConfig":
        """Return a copy with more entries of `without_effect`."""
        return replace(self, without_effect={**notes, **self.without_effect})


def _is_section(factory: object) -> TypeGuard[type]:
    return isinstance(factory, type) and is_dataclass(factory)


def _lengths_of(feature: Feature) -> Callable[[RunConfig], Lengths | None]:
    lengths = feature.lengths
    return lambda config: (
        lengths if lengths is not None and lengths.is_on(config) else None
    )


# Name of each section of the package → its dataclass.
_OWN: Mapping[str, type] = MappingProxyType(
    {
        f.name: section
        for f in fields(RunConfig)
        if _is_section(section := f.default_factory)
    }
)


@per_features
def sections() -> Mapping[str, type]:
    """Return the dataclass of each section by its name, those of features last."""
    return MappingProxyType({**_OWN, **_added()})


def _added() -> dict[str, type]:
    """Return the sections of features. Raises ConfigError for a name that the package has."""
    found = {f.name: f.options for f in features() if f.options is not None}
    for name in found:
        if name in RunConfig.__dataclass_fields__:
            raise ConfigError(
                f"a feature is named {name!r}, as a section of the package. Give it another name."
            )
    return found


def formerly(section: str) -> str:
    """Return the section that had the options of a section in earlier files; its own name if none had."""
    found = (f.formerly for f in features() if f.name == section)
    return next(found, "") or section


def name_of_section(name: str) -> str:
    """Return the name that a section of an earlier file has now."""
    if name in sections():
        return name
    return next((new for new in sections() if formerly(new) == name), name)


def home_of(section: str, name: str) -> str:
    """Return the section that has an option now, of a file in which `section` has it."""
    if f"{section}.{name}" in all_options():
        return section
    moved = (new for new in sections() if formerly(new) == section)
    return next((new for new in moved if f"{new}.{name}" in all_options()), section)


def by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections by name as arguments of `RunConfig`."""
    own = {name: section for name, section in values.items() if name in _OWN}
    added = [(name, section) for name, section in values.items() if name not in _OWN]
    return {**own, "more": tuple(added)}


@per_features
def all_options() -> Mapping[str, Option]:
    """Return the option of each path, in the order of declaration."""
    found: dict[str, Option] = {}
    for section, cls in sections().items():
        found |= {option.path: option for option in options_of(section, cls)}
    return MappingProxyType(found)


def options_in(section: str) -> list[Option]:
    """Return the options of a section, in the order of declaration."""
    return [option for option in all_options().values() if option.section == section]


def non_default(config: RunConfig) -> Iterator[tuple[Option, Any]]:
    """Return the options whose value is not the default."""
    return (
        (option, config.get(path))
        for path, option in all_options().items()
        if not config.is_default(path)
    )
