"""`Feature`: what a package outside the core adds to it, and how such packages are found.

A feature is a value whose parts are all optional: options, rules, models, a change of the layers, sinks of
metrics, commands, observers of a run. A module has features as its attribute `FEATURES`. Importing the module
may also register entries (`@MODELS.register`), which then count as part of its features.

    own            `feature.py` of each package below the wings, extensions/ and compat/
    installed      modules that a distribution names as entry points of the group `megatron_ds.features`;
                   found by all commands
    --import M     modules that a command line or a --config file names

A checkpoint remembers the features of its run (run.json), by which a command that opens it names what is
missing. Modules are never imported because a checkpoint names them.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import ConfigError

T = TypeVar("T")

WINGS = ("compat", "extensions")
ENTRY_POINTS = "megatron_ds.features"
# Noun of a registry → section and option that name an entry of it, without which a checkpoint cannot be opened.
NAMED = {
    "model": ("model", "model"),
    "tokenizer": ("data", "tokenizer_type"),
    "optimizer": ("optimizer", "optimizer"),
}
FLAG = "--import"


class Later:
    """A function, or another object, of a module that is imported when the object is used.

    Features are declared at every start; what they compute with is loaded by the runs that use it.
    """

    def __init__(self, package: str, target: str):
        """package: of the declaration, its `__package__`. target: ".module:function", relative to it"""
        self._package = package
        self._module, _, self._name = target.partition(":")

    def load(self) -> Any:
        """Return the object, or without a name the module."""
        module = importlib.import_module(self._module, self._package)
        return getattr(module, self._name) if self._name else module

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.load()(*args, **named)


@dataclass(frozen=True)
class Objective:
    """What a run is trained for in place of the model's own loss.

    is_on         (RunConfig) -> whether the run has this objective
    loss          (RunConfig, Mesh) -> the loss: (output of the last layer, batch) -> `models.Loss`
    data          (DataKind of the model, RunConfig) -> DataKind; None for that of the model
    start         (RunConfig, Tokenizer) -> `training.objective.Prepare`, what precedes the first step; None: nothing
    plan          (RunConfig, Grid, rank, device, number of micro-batches) -> an object whose `added_to(RankPlan)`
                  adds bytes and traffic to the plan of a rank, or None
    is_of_tokens  whether the loss is a mean over tokens, which has a perplexity
    """

    is_on: Callable[[Any], bool]
    loss: Callable[[Any, Any], Callable]
    data: Callable[[Any, Any], Any] | None = None
    start: Callable[[Any, Any], Callable] | None = None
    plan: Callable[..., Any] | None = None
    is_of_tokens: bool = True


@dataclass(frozen=True)
class Lengths:
    """Sequences of a run that are shorter than its samples in some steps.

    is_on      (RunConfig) -> whether the run has them
    make       (RunConfig) -> `progress.sequence_lengths.SequenceLengths`. Raises ConfigError
    shortened  (those lengths, batch, length) -> the batch with sequences of that length
    """

    is_on: Callable[[Any], bool]
    make: Callable[[Any], Any]
    shortened: Callable[[Any, Any, int], Any]


@dataclass(frozen=True)
class ChangedSamples:
    """Samples of a run that are others than those of its corpora.

    is_on     (RunConfig) -> whether the run has them
    change    (`data.loading.datasets.Datasets`, RunConfig, Tokenizer) -> Datasets
    identity  (RunConfig) -> plain values, with which a checkpoint that is loaded must agree
    """

    is_on: Callable[[Any], bool]
    change: Callable[[Any, Any, Any], Any]
    identity: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class NoEffect:
    """Why options have no effect, and whether they have none in a configuration."""

    why: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class MetricSink:
    """Where the metrics of a run go, besides the files of the log. On rank 0 alone.

    is_on    (RunConfig) -> whether the run has it
    make     (RunConfig, run id) -> `training.observe.sink.Sink`
    check    (RunConfig) -> None; raises ConfigError at the start of a run where nothing can be written
    require  () -> None; raises ConfigError where a package that it needs is not installed
    points   (RunConfig, id) -> `PointSink` of the curves of an engine; None: engines have no such sink
    has_tags whether options of values that have a tag of their own have an effect where this sink is the only one
    """

    is_on: Callable[[Any], bool]
    make: Callable[[Any, str], Any]
    check: Callable[[Any], None] | None = None
    require: Callable[[], None] | None = None
    points: Callable[[Any, str], Any] | None = None
    has_tags: bool = True


@dataclass(frozen=True)
class Feature:
    """The parts that one package adds.

    name       of the feature, and of its section of options
    title      of the section, in texts of help
    options    the section: a frozen dataclass whose fields are declared with `config.option`
    extends    name of a section of the package → a dataclass of options that the section has as a base class; only of
               features in the wings
    is_on      (RunConfig) -> whether a run uses `layers`, `added`, `lengths`, `order`, `kept` and `planned`, whose
               modules are loaded then; None: always
    implies    (RunConfig) -> option path → (value, reason): what the feature sets where no source does
               (value, reason, True): also in place of what a source gives
    rules      (RunConfig) -> problems of the configuration, as sentences
    provides   name of a `Provided` of the core → the object
    registers  noun of a registry → name of an entry → the module that registers it, imported when the entry is used;
               of an alias, that module or the name of the entry
    optimizers name of an optimizer that it registers → its `config.optimizer_facts.OptimizerFacts`
    models     name of a model that it registers → `config.model_facts.ModelFacts`, where they are not those of a GPT
    objective  what the run is trained for in place of the model's own loss
    layers     (layers, RunConfig, ParallelContext) -> layers: what becomes of the layers of a model. Runs and their
               plans of memory, traffic and FLOPs have them; conversions are those of the model alone
    layouts    a function that returns the `models.attention_layouts.AttentionLayouts`, by which layers see some keys
    mixer      (ModelConfig, number of a block) -> `models.mixers.Mixer`, which fills the slot of its attention; None:
               as without the feature
    after      names of features whose `layers` come first
    added      (RunConfig) -> `config.added_weights.AddedWeights`, if the run trains those alone, beside frozen weights.
               Its noun is the name of the feature
    unloadable (identity of a checkpoint, identity of the run or None where a whole model is wanted, folder) -> why its
               weights cannot be loaded, as sentences
    samples    samples that are others than those of the corpora
    lengths    lengths of sequences that change from step to step
    order      (RunConfig) -> `config.sample_order.SampleOrder`, if the samples of one epoch have an order of their own
    kept       (RunConfig) -> `progress.kept_tokens.KeptTokens`, if some blocks process a part of each sequence
    least_length  (RunConfig) -> tokens that a sequence must have at least for its options
    described  (Replica, name of the launcher, RunConfig as given) -> what the run is, for the log of rank 0
    prepared   (Replica) -> what it has prepared for the first step, for the log; "" for nothing
    dry_run    (RunConfig, Launch) -> exit code: prints the plan of --dry-run
    planned    (RunConfig) -> what the plan of --dry-run prints besides: an object with `recorder`, which makes a
               `planning.fake_stages.Recorder` of the work of each stage, and `lines`, of the recorded plan
    synonyms   name of an option in other projects, with hyphens → its flag here, or a sentence
    formerly   the section of the package that had the options in earlier files, if there was one
    sinks      where metrics go
    commands   name → `commands.Command`, whose module is an absolute name
    observers  (RunConfig) -> `training.observer.Observer` on every rank, or None if it is off
    outputs    (RunConfig, Mesh) -> None, on every rank before the model is built: raises ConfigError where a run could
               not write or measure what it asks for
    useless    (paths of options, `NoEffect`) → why and when they have no effect
    checksums  (RunConfig) -> whether the optimizer keeps a checksum of the gradients that a rank computed
    """

    name: str
    title: str = ""
    options: type | None = None
    formerly: str = ""
    is_on: Callable[[Any], bool] | None = None
    implies: Callable[[Any], Mapping[str, tuple]] | None = None
    rules: Sequence[Callable[[Any], Iterable[str]]] = ()
    provides: Mapping[str, Later] = field(default_factory=dict)
    registers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    extends: Mapping[str, type] = field(default_factory=dict)
    optimizers: Mapping[str, Later] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    objective: Objective | None = None
    layers: Callable[[list, Any, Any], list] | None = None
    layouts: Callable[[], Any] | None = None
    mixer: Callable[[Any, int], Any | None] | None = None
    after: Sequence[str] = ()
    added: Callable[[Any], Any | None] | None = None
    unloadable: Callable[[Mapping, Mapping | None, Any], Iterable[str]] | None = None
    samples: ChangedSamples | None = None
    lengths: Lengths | None = None
    order: Callable[[Any], Any | None] | None = None
    kept: Callable[[Any], Any | None] | None = None
    least_length: Callable[[Any], int] | None = None
    described: Callable[[Any, str, Any], str] | None = None
    prepared: Callable[[Any], str] | None = None
    dry_run: Callable[[Any, Any], int] | None = None
    planned: Callable[[Any], Any] | None = None
    synonyms: Mapping[str, str] = field(default_factory=dict)
    sinks: Sequence[MetricSink] = ()
    commands: Mapping[str, Any] = field(default_factory=dict)
    observers: Sequence[Callable[[Any], Any]] = ()
    outputs: Callable[[Any, Any], None] | None = None
    useless: Sequence[tuple[tuple[str, ...], NoEffect]] = ()
    checksums: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Origin:
    """A module with features, as run.json records it.

    distribution  "name version" of the distribution whose entry point it is; empty for --import
    supplies      what it adds: "model parallel-gpt", "option --noise", "command count"
    """

    module: str
    distribution: str = ""
    supplies: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the plain values for run.json."""
        return {
            "module": self.module,
            "distribution": self.distribution,
            "supplies": list(self.supplies),
        }


class _Loaded:
    """The features of this process. number: changes with every change of them."""

    def __init__(self) -> None:
        self.features: list[Feature] = []
        self.origins: dict[str, Origin] = {}
        self.watched: list[Callable[[], Iterable[tuple[str, str]]]] = []
        self.number = 0
        self.has_own = False
        self.has_installed = False


_LOADED = _Loaded()


# ---- What is loaded.


def features() -> tuple[Feature, ...]:
    """Return all features, those of the wings first.

    Raises ConfigError if an installed one cannot be imported.
    """
    _load_installed()
    return tuple(_LOADED.features)


def rules_if(
    is_on: Callable[[Any], bool], *rules: Callable[[Any], Iterable[str]]
) -> tuple[Callable[[Any], Iterable[str]], ...]:
    """Return rules that find nothing unless `is_on` (RunConfig): their module is loaded only then."""
    return tuple(
        lambda config, rule=rule: rule(config) if is_on(config) else ()
        for rule in rules
    )


class Provided(Generic[T]):
    """An object that the core takes from a feature, and does without where none has it.

    The module that uses it declares it: TILES: Provided[Any] = Provided("attention tiles").
    """

    def __init__(self, name: str):
        self.name = name

    def find(self) -> T | None:
        """Return the object; None where no feature has it."""
        return find_provided(self.name)

    def get(self) -> T:
        """Return the object. Raises ConfigError where no feature has it."""
        found = self.find()
        if found is None:
            raise ConfigError(
                f"{self.name}: no feature that is installed has it.{missing_wings()}"
            )
        return found


def find_provided(name: str) -> Any | None:
    """Return what a feature has under the name of a `Provided`; None where none has it.

    Features of installed distributions are not looked for, so that a class may be made of it at import.
    """
    _load_own()
    found = (feature.provides.get(name) for feature in _LOADED.features)
    later = next((one for one in found if one is not None), None)
    return None if later is None else later.load()


def own_features() -> tuple[Feature, ...]:
    """Return the features of the wings. Those of installed distributions are not looked for, as by `find_provided`."""
    _load_own()
    return tuple(_LOADED.features)


def the_one(
    part: Callable[[Feature], Callable[[Any], T | None] | None], config: Any
) -> T | None:
    """Return what a part of a feature has for a configuration, of which a run has one; None where none has any.

    part: takes the part of a feature. Raises ConfigError if two features have one.
    """
    found: dict[str, T] = {}
    for feature in features():
        asked = part(feature)
        answer = asked(config) if asked is not None and used(feature, config) else None
        if answer is not None:
            found[feature.name] = answer
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(found)} change the same part of a run, which has it once. Switch all but one of them off."
        )
    return next(iter(found.values()), None)


def used(feature: Feature, config: Any) -> bool:
    """Return whether a run uses a feature."""
    return feature.is_on is None or feature.is_on(config)


def layer_changes(config: Any) -> list[Callable[[list, Any, Any], list]]:
    """Return the parts `layers` of the features of a run, each behind those that it names in `after`."""
    waiting = {feature.name: feature for feature in features()}
    changes: list[Callable[[list, Any, Any], list]] = []

    def place(feature: Feature) -> None:
        for name in feature.after:
            if name in waiting:
                place(waiting.pop(name))
        if feature.layers is not None and used(feature, config):
            changes.append(feature.layers)

    while waiting:
        place(waiting.pop(next(iter(waiting))))
    return changes


def metric_sinks(config: Any) -> list[MetricSink]:
    """Return the sinks of features that a configuration switches on."""
    found: list[MetricSink] = []
    for feature in features():
        found += [sink for sink in feature.sinks if sink.is_on(config)]
    return found


def changed_samples(config: Any) -> list[ChangedSamples]:
    """Return the changes of samples that a configuration switches on."""
    found = (feature.samples for feature in features())
    return [one for one in found if one is not None and one.is_on(config)]


def wants_checksums(config: Any) -> bool:
    """Return whether a feature of a run compares the gradients of its ranks."""
    return any(
        feature.checksums(config)
        for feature in features()
        if feature.checksums is not None
    )


def sends_no_tags(config: Any) -> bool:
    """Return whether no sink receives values that have a tag of their own."""
    return not any(sink.has_tags for sink in metric_sinks(config))


NO_TAGS = NoEffect(
    "there is no --tensorboard-dir, nor a service that receives its values",
    sends_no_tags,
)


def objectives(config: Any) -> dict[str, Objective]:
    """Return the objectives that a configuration switches on, by the names of their features; rules allow one."""
    found = {feature.name: feature.objective for feature in features()}
    return {
        name: objective
        for name, objective in found.items()
        if objective is not None and objective.is_on(config)
    }


def origins() -> tuple[Origin, ...]:
    """Return the modules that the features come from."""
    _load_installed()
    return tuple(_LOADED.origins.values())


def per_features(function: Callable[[], T]) -> Callable[[], T]:
    """Keep the result of a function without arguments until other features are loaded."""
    kept: dict[int, T] = {}

    @wraps(function)
    def once() -> T:
        _load_installed()
        if _LOADED.number not in kept:
            kept.clear()
            kept[_LOADED.number] = function()
        return kept[_LOADED.number]

    return once


# ---- Loading.


def import_features(modules: Iterable[str]) -> None:
    """Import modules that the user named, and add their features.

    The working directory is searched last, so that no file there hides an installed module. A module that was
    imported before is left alone. Raises ConfigError if one cannot be imported.
    """
    _load_installed()
    for module in modules:
        if module not in _LOADED.origins:
            here = os.getcwd()
            if here not in sys.path:
                sys.path.append(here)
            _load(Origin(module), f"{FLAG} {module}")


def _load_installed() -> None:
    if _LOADED.has_installed:
        return
    _load_own()
    # First, since features ask for options and registries, which lead back here.
    _LOADED.has_installed = True
    try:
        for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.value):
            name = _distribution(entry)
            if entry.module not in _LOADED.origins:
                _load(Origin(entry.module, name), f"the installed distribution {name}")
    except ConfigError:
        # The next look-up raises it again: none goes on without the feature.
        _LOADED.has_installed = False
        raise


def _load_own() -> None:
    if _LOADED.has_own:
        return
    # The configuration first: its classes ask for features while they are made, which loads all of them here.
    importlib.import_module(f"{__package__}.config")
    if _LOADED.has_own:
        return
    _LOADED.has_own = True
    for module in _own_modules():
        for feature in _features_of(importlib.import_module(module), module):
            _add(feature, module)
    _LOADED.number += 1


def _own_modules() -> Iterator[str]:
    """Yield the declarations of the wings that are installed, without importing the packages around them."""
    for wing in WINGS:
        spec = find_spec(f"{__package__}.{wing}")
        folders = spec.submodule_search_locations if spec is not None else None
        for folder in folders or ():
            for file in sorted(Path(folder).glob("*/feature.py")):
                yield f"{__package__}.{wing}.{file.parent.name}.feature"


def _distribution(entry: EntryPoint) -> str:
    found = entry.dist
    return f"{found.name} {found.version}" if found is not None else entry.name


def _load(origin: Origin, source: str) -> None:
    """Import one module, and record what it adds. source: for messages."""
    before = _registered()
    module = _import(origin.module, source)
    found = _features_of(module, source)
    for feature in found:
        _add(feature, source)
    # What the import has registered, besides the parts of the features.
    new = [name for entry in _registered() if entry not in before for name in entry[1:]]
    supplies = [*_names(found), *new]
    _LOADED.origins[origin.module] = replace(origin, supplies=tuple(supplies))
    _LOADED.number += 1


def _import(module: str, source: str) -> Any:
    """Import a module. Errors inside of it keep their traceback as the cause."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"{source}: {module!r} is no name of a module. Write it as in `import package.module`: without .py, and "
            "with points between its parts."
        )
    try:
        return importlib.import_module(module)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{source}: its module {module} cannot be imported ({what}). The features that it has are not "
            "known without it. Check the name, and that the module is in this folder, on PYTHONPATH or installed."
        ) from error


def _features_of(module: Any, source: str) -> tuple[Feature, ...]:
    found = tuple(getattr(module, "FEATURES", ()))
    for feature in found:
        if not isinstance(feature, Feature):
            raise ConfigError(
                f"{source}: FEATURES of {module.__name__} has {feature!r}, which is no Feature."
            )
    return found


def _add(feature: Feature, source: str) -> None:
    names = [known.name for known in _LOADED.features]
    if feature.name in names:
        raise ConfigError(
            f"{source}: a feature is named {feature.name!r}, and another one has this name. Rename one of them."
        )
    for noun, entries in feature.registers.items():
        if not isinstance(entries, Mapping):
            raise ConfigError(
                f"{source}: `registers` of the feature {feature.name!r} gives {entries!r} for {noun}. Give each "
                'entry by its name: {"'
                + noun
                + '": {"name of the entry": "module that registers it"}}.'
            )
    _LOADED.features.append(feature)


# ---- Naming what features add.


def watch_names(names: Callable[[], Iterable[tuple[str, str]]]) -> None:
    """Register a function that returns (module, "noun name") for the entries of a table that are not the package's."""
    _LOADED.watched.append(names)


def _registered() -> list[tuple[str, str]]:
    return [entry for table in _LOADED.watched for entry in table()]


def scripted() -> Iterator[Origin]:
    """Yield what modules have registered that are no features: an entry script, or what it imports."""
    known = {name for origin in origins() for name in origin.supplies}
    of_module: dict[str, list[str]] = {}
    for module, name in _registered():
        if name not in known:
            of_module.setdefault(module, []).append(name)
    for module, names in of_module.items():
        # A script is imported by the name of its file.
        name = Path(sys.argv[0]).stem if module == "__main__" else module
        yield Origin(name, "", tuple(names))


def record() -> list[dict[str, Any]]:
    """Return the value `features` of run.json: what this process has besides the package."""
    return [origin.record() for origin in (*origins(), *scripted())]


def _names(found: Sequence[Feature]) -> Iterator[str]:
    for feature in found:
        if feature.options is not None:
            yield f"options of [{feature.name}]"
        yield from (f"command {name}" for name in feature.commands)
        parts = {
            "rules": feature.rules,
            "objective": feature.objective,
            "layers": feature.layers,
            "added weights": feature.added,
            "lengths": feature.lengths,
            "order": feature.order,
            "kept tokens": feature.kept,
            "sinks": feature.sinks,
            "observers": feature.observers,
        }
        yield from (f"{part} of {feature.name}" for part, has in parts.items() if has)


def sections_without_features(run: Mapping, where: str) -> set[str]:
    """Return the sections in a run.json of features that are not loaded, and that the run had no use for.

    run: its values, from a file that any program may have written; where: the file or folder, for messages. Raises
    ConfigError, with the remedy, if the run needs a feature that is not loaded.
    """
    recorded = run.get("features")
    entries = recorded if isinstance(recorded, list) else []
    missing = [entry for entry in entries if isinstance(entry, Mapping)]
    missing = [entry for entry in missing if not _is_loaded(entry)]
    needed = [entry for entry in missing if _is_needed(entry, run.get("config"))]
    if needed:
        raise ConfigError(f"{where}: {' '.join(map(_sentence, needed))}")
    return {section for entry in missing for section in _sections(entry)}


def _is_loaded(entry: Mapping) -> bool:
    """Return whether a module is loaded, or another one, such as the script that runs, supplies the same."""
    loaded = {origin.module for origin in origins()}
    here = {name for _, name in _registered()}
    supplies = set(_supplies(entry))
    return str(entry.get("module")) in loaded or bool(supplies) and supplies <= here


def _is_needed(entry: Mapping, config: Any) -> bool:
    """Return whether the run that wrote `config` has a model, a tokenizer, an optimizer or an option of a module."""
    sections = config if isinstance(config, Mapping) else {}
    named = {
        f"{noun} {_value(sections, section, option)}"
        for noun, (section, option) in NAMED.items()
    }
    sources = sections.get("sources")
    given = {str(path).partition(".")[0] for path in sources or ()}
    supplies = _supplies(entry)
    changes_layers = any(word.startswith("layers of ") for word in supplies)
    own = _sections(entry)
    return (
        bool(named & set(supplies)) or bool(own & given) or changes_layers and not own
    )


def _value(sections: Mapping, section: str, option: str) -> Any:
    found = sections.get(section)
    return found.get(option) if isinstance(found, Mapping) else None


def _supplies(entry: Mapping) -> list[str]:
    supplies = entry.get("supplies")
    return list(map(str, supplies)) if isinstance(supplies, list) else []


def _sections(entry: Mapping) -> set[str]:
    """Return the sections of options that a module has."""
    found = (re.fullmatch(r"options of \[(\w+)\]", word) for word in _supplies(entry))
    return {match[1] for match in found if match}


def _sentence(entry: Mapping) -> str:
    module = entry.get("module")
    what = ", ".join(_supplies(entry))
    distribution = entry.get("distribution")
    remedy = f"name it with {FLAG} {module}"
    if distribution:
        remedy = f"install {distribution}, or {remedy}"
    return f"the run uses {what or 'features'} of the module {module}: {remedy}."


# ---- The wings.


def missing_wings() -> str:
    """Return a sentence for messages about unknown names: the wings that are not installed. Empty if all are."""
    missing = [f"{__package__}.{wing}" for wing in WINGS if not is_installed(wing)]
    if not missing:
        return ""
    return f" Not installed: {', '.join(missing)}, which may have it. Install the whole package."


def is_installed(wing: str) -> bool:
    """Return whether a package below megatron_ds is there."""
    return find_spec(f"{__package__}.{wing}") is not None
