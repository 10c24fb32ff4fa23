"""`Family`: names and packings of the models of one architecture in another program, and their settings.

A family is a table of rows, used in both directions and for all kinds of tensors:

    Row("decoder.layers.{i}.self_attention.linear_qkv.{leaf}",
        "layers.{i}.self_attn.q_proj.{leaf}  layers.{i}.self_attn.k_proj.{leaf}  …", QKV_SPLIT)

{i} is the number of a layer, {e} of an expert, {leaf} the last part of a name, such as weight or bias. All
names of ours come from the parameters of the model, so a row that does not apply (a bias that the model
lacks) asks for nothing.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from threading import Lock
from typing import Any

import torch

from ...config.options.model import ModelConfig
from ...config.options.option import coerce
from ...config.run import options_in
from ...errors import CheckpointError
from ...models.specs import specs_of
from ...mpu.param_spec import ParamSpec
from ...tensor_parallel.init import initialize_interval
from .files.stored_tensor import StoredTensor
from .packings import SAME, Packing

LISTED = 10  # names in one message
MOST = 10_000  # layers, or experts of a layer
# Sizes that no model has: products of them would not be numbers of elements.
MOST_OF = {
    "hidden_size": 10**6,
    "ffn_size": 10**7,
    "vocab_size": 10**8,
    "positions": 10**9,
}
SEED = 1234  # of weights that no file holds
PLACES = {"i": r"(?P<i>\d+)", "leaf": r"(?P<leaf>\w+)"}


@dataclass(frozen=True)
class Row:
    """ours: a name with {i} and {leaf}; theirs: names, separated by white space, also with {e}.

    suits  function(model) -> whether its tensors have these names; the first row that does counts
    """

    ours: str
    theirs: str
    packing: Packing = SAME
    suits: Callable[[ModelConfig], bool] = lambda model: True

    @cached_property
    def pattern(self) -> re.Pattern:
        """Matches our names."""
        escaped = re.escape(self.ours).replace(r"\{", "{").replace(r"\}", "}")
        return re.compile(escaped.format(**PLACES))

    def names(self, ours: str, experts: int) -> list[str] | None:
        """Return their names for our name; None if the row is of another name. experts: number of the layer's."""
        if not (found := self.pattern.fullmatch(ours)):
            return None
        patterns = self.theirs.split()
        numbers = range(experts) if "{e}" in self.theirs else (0,)
        names: list[str] = []
        for e in numbers:
            names += [pattern.format(e=e, **found.groupdict()) for pattern in patterns]
        return names


@dataclass(frozen=True)
class Family:
    """One architecture of another program.

    name      of the family, as --family takes it
    rows      its tensors
    options   function(settings of the files) -> our model options. Raises CheckpointError naming what this
              package does not compute
    settings  function(model) -> settings, of which `options` makes the same model if the family can express
              it
    prefix    of all their names; files of the bare model lack it
    notes     function(settings of the files) -> sentences on settings that a run does not follow
    ignored   patterns of names that hold nothing to be learned
    precise   patterns of names that stay in fp32 beside weights of another dtype
    tied      (name, name that it must equal): of an output layer that files of tied models may hold
    renamed   function(our name, model) -> the name by which `rows` know it
    copies    function(model) -> name → name that it equals: of weights that their files hold several times
    in_memory  what modules of their models have in place of `prefix`; None: the same
    aliases   (pattern of re, replacement): names in files → those in `rows`
    """

    name: str
    rows: Sequence[Row]
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    settings: Callable[[ModelConfig], dict[str, Any]]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    precise: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: Callable[[Mapping[str, Any]], Sequence[str]] = lambda settings: ()
    renamed: Callable[[str, ModelConfig], str] = lambda name, model: name
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda model: {}
    in_memory: str | None = None
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of ours and theirs: our spec, their names and shapes, and the packing between them."""

    spec: ParamSpec
    theirs: tuple[str, ...]
    their_shapes: tuple[tuple[int, ...], ...]
    packing: Packing

    @property
    def ours(self) -> str:
        """Our name."""
        return self.spec.name


def entries_of(family: Family, model: ModelConfig) -> list[TensorMapping]:
    """Return all tensors of the model. Raises CheckpointError for one that the family has no name for."""
    found = []
    for spec in specs_of(model):
        name = family.renamed(spec.name, model)
        entry = next(
            filter(None, (_entry(row, name, spec, model) for row in family.rows)), None
        )
        if entry is None:
            raise CheckpointError(
                f"{family.name} has no tensor for {spec.name} {list(spec.shape)}: models "
                "of this family lack it. Choose another family or format."
            )
        found.append(entry)
    return found


def _entry(
    row: Row, name: str, spec: ParamSpec, model: ModelConfig
) -> TensorMapping | None:
    theirs = row.names(name, spec.shape[0] if spec.shape else 0)
    if theirs is None or not row.suits(model):
        return None
    return TensorMapping(
        spec, tuple(theirs), tuple(row.packing.shapes(spec.shape, model)), row.packing
    )


def model_of(options: Mapping[str, Any], folder: object) -> ModelConfig:
    """Return the model of these options. Raises CheckpointError for values that no model has."""
    # Values pass the same checks as flags.
    declared = {option.name: option for option in options_in("model")}
    if odd := [name for name in options if name not in declared]:
        raise CheckpointError(
            f"{folder} needs the model option {odd[0]}, which this version lacks."
        )
    try:
        values: dict[str, Any] = {
            name: value if value is None else coerce(declared[name], value, name)
            for name, value in options.items()
        }
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: its settings describe no model: {error}"
        ) from error
    # A damaged file must not make lists of billions of layers.
    most = {
        "layers": values.get("num_layers"),
        "experts": max(values.get("num_experts") or (0,)),
    }
    if odd := [
        f"{number} {name}"
        for name, number in most.items()
        if number is None or number > MOST
    ]:
        raise CheckpointError(
            f"{folder}: its settings describe a model of {odd[0]}, more than {MOST}: the "
            "file is damaged."
        )
    # Widths and heads must fit before tensors are compared with the model.
    given = {"seq_length": values.get("max_position_embeddings"), **values}
    model = ModelConfig(**given)
    _check_widths(model, folder)
    if model.num_attention_heads % model.query_groups:
        raise CheckpointError(
            f"{folder}: {model.num_attention_heads} attention heads do not form "
            f"{model.query_groups} groups."
        )
    return model


def _check_widths(model: ModelConfig, folder: object) -> None:
    sizes = {name: (getattr(model, name), most) for name, most in MOST_OF.items()}
    sizes["heads × kv_channels"] = (
        model.num_attention_heads * model.head_dim,
        MOST_OF["hidden_size"],
    )
    if any(model.experts):
        sizes["moe_ffn_hidden_size"] = (model.expert_ffn_size, MOST_OF["hidden_size"])
        sizes["moe_shared_expert_intermediate_size"] = (
            model.moe_shared_expert_intermediate_size,
            MOST_OF["ffn_size"],
        )
    if odd := [
        f"{name} {size}, more than {most}"
        for name, (size, most) in sizes.items()
        if size is not None and size > most
    ]:
        raise CheckpointError(
            f"{folder}: its settings describe a model of {odd[0]}: the file is damaged."
        )


# ---- Their tensors → ours.


def to_ours(
    entries: Iterable[TensorMapping],
    stored: Mapping[str, StoredTensor],
    model: ModelConfig,
) -> dict[str, StoredTensor]:
    """Return our tensors, made when they are read. Raises CheckpointError listing all tensors of another shape.

    Entries of which any tensor is not in `stored` are left out; see `missing` and `initial`.
    """
    wrong: list[str] = []
    for entry in entries:
        if entry.packing.is_joined and _has_all_rows(entry, stored):
            continue
        for name, shape in zip(entry.theirs, entry.their_shapes):
            if name in stored and tuple(stored[name].shape) != tuple(shape):
                tensor = stored[name]
                wrong.append(
                    f"{tensor.place} has shape {list(tensor.shape)} and {list(shape)} is needed"
                )
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors do not have the shape that the settings describe: "
            f"{listing(wrong, '; ')}. The files are of another model, or mixed up."
        )
    return {
        entry.ours: _ours(entry, [stored[name] for name in entry.theirs], model)
        for entry in entries
        if all(name in stored for name in entry.theirs)
    }


def _has_all_rows(entry: TensorMapping, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether the tensors of an entry have together the rows that it needs, each row as it needs them."""
    found = [tuple(stored[name].shape) for name in entry.theirs if name in stored]
    rows = [sum(shape[0] for shape in s) for s in (found, entry.their_shapes)]
    widths = {shape[1:] for s in (found, entry.their_shapes) for shape in s}
    return rows[0] == rows[1] and len(widths) == 1


def _ours(
    entry: TensorMapping, parts: Sequence[StoredTensor], model: ModelConfig
) -> StoredTensor:
    def read() -> torch.Tensor:
        return entry.packing.to_ours([part.read() for part in parts], model)

    place = (
        parts[0].place
        if len(parts) == 1
        else f"{parts[0].place} and {len(parts) - 1} more"
    )
    return StoredTensor(tuple(entry.spec.shape), parts[0].dtype, read, place)


def initial(
    entries: Iterable[TensorMapping], names: Iterable[str]
) -> dict[str, StoredTensor]:
    """Return our tensors of these names with the values that a new model has, for weights that no file holds."""

    def read(spec: ParamSpec) -> torch.Tensor:
        values = torch.empty(spec.numel)
        initialize_interval(values, spec, 0, SEED, {})
        return values.view(spec.shape)

    specs = {entry.ours: entry.spec for entry in entries}
    return {
        name: StoredTensor(
            tuple(specs[name].shape),
            torch.float32,
            partial(read, specs[name]),
            "new values",
        )
        for name in names
    }


# ---- Our tensors → theirs.


def to_theirs(
    entries: Iterable[TensorMapping],
    stored: Mapping[str, StoredTensor],
    model: ModelConfig,
) -> dict[str, StoredTensor]:
    """Return their tensors. Those of one entry follow each other and share one reading of ours."""
    found: dict[str, StoredTensor] = {}
    for entry in entries:
        if entry.ours in stored:
            found |= _theirs(entry, stored[entry.ours], model)
    return found


def _theirs(
    entry: TensorMapping, ours: StoredTensor, model: ModelConfig
) -> dict[str, StoredTensor]:
    last: dict[
        int, torch.Tensor
    ] = {}  # what the last reading left for the names that follow
    one_reads = Lock()

    def read(index: int) -> torch.Tensor:
        with one_reads:
            if index not in last:
                last.update(enumerate(entry.packing.to_theirs(ours.read(), model)))
            return last.pop(index)

    return {
        name: StoredTensor(shape, ours.dtype, partial(read, index), ours.place)
        for index, (name, shape) in enumerate(zip(entry.theirs, entry.their_shapes))
    }


# ---- Names that are left over.


def missing(
    entries: Iterable[TensorMapping],
    stored: Mapping[str, StoredTensor],
    allowed: Sequence[str],
) -> list[str]:
    """Return their names that the model needs and the files lack. Raises CheckpointError unless all are allowed."""
    absent = [name for entry in entries for name in entry.theirs if name not in stored]
    if refused := [name for name in absent if not matches(name, allowed)]:
        raise CheckpointError(
            f"{len(refused)} tensors are missing in the files: {listing(refused)}. The "
            "model would keep random values there. Complete the files, or allow them: "
            "--allow-missing PATTERN."
        )
    return absent


def replaced(
    entries: Iterable[TensorMapping], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Return their names of parts of a tensor of which other parts are missing. The whole tensor of ours then gets
    new values; see `initial`."""
    names: list[str] = []
    for entry in entries:
        present = [name for name in entry.theirs if name in stored]
        if len(present) < len(entry.theirs):
            names += present
    return names


def unused(
    entries: Iterable[TensorMapping],
    stored: Mapping[str, StoredTensor],
    family: Family,
    allowed: Sequence[str],
) -> list[str]:
    """Return the names in the files that the model has no place for. Raises CheckpointError unless all are
    allowed."""
    used = {name for entry in entries for name in entry.theirs}
    left = [
        name
        for name in stored
        if name not in used and not matches(name, family.ignored)
    ]
    if refused := [name for name in left if not matches(name, allowed)]:
        raise CheckpointError(
            f"{len(refused)} tensors in the files have no place in the model: "
            f"{listing(refused)}. Without them the model computes something else. Allow "
            "that: --allow-unused PATTERN."
        )
    return left


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern of fnmatch matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def listing(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = f"{separator}and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return separator.join(names[:LISTED]) + more
