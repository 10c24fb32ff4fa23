"""A Megatron-LM checkpoint, merged over its ranks, in our terms; the same for both of its formats.

Names and packings of the merged tensors are ours already. What is left: the model's options follow from the
arguments, rows that pad the vocabulary are removed, copies of a tied head are compared and left out, and
tensors of experts are joined. 16-bit weights are replaced by their fp32 masters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....errors import CheckpointError
from ....models.specs import specs_of
from ..family import listing, matches, model_of
from ..files.stored_tensor import (
    MASTER,
    WEIGHT,
    LogicalCheckpoint,
    RawCheckpoint,
    StoredProgress,
    StoredTensor,
    compared_with,
)
from ..files.tensor_views import first_rows
from ..formats import Wishes
from .args import model_options
from .names import EMBEDDING, HEAD, VOCABULARY

MOMENTS = ("exp_avg", "exp_avg_sq")
UNTRAINED = ".router.expert_bias"  # it is set by the loads of the experts
ARGUMENTS = "argparse.Namespace"  # the class of the run's arguments, which are read
# Flat buffers name no parameters, so a master is compared with its weight.
WRONG_MASTER = (
    "The optimizer state is of another save or rank, or in another order, or of tied embeddings "
    "on two pipeline stages with --dist-ckpt-optim-fully-reshardable, which megatron-core 0.16.1 "
    "stores wrongly. To load the weights alone, give --no-optim (in training, --no-load-optim)."
)


def logical(
    raw: RawCheckpoint, bert: bool, wishes: Wishes, format_name: str
) -> LogicalCheckpoint:
    """Return the checkpoint with the options of its model. raw: under our names, with padded vocabulary.

    Raises CheckpointError listing tensors that are missing, not used, or of another shape.
    """
    # The arguments give the model, and the model the shapes that tensors must have.
    options = model_options(raw.settings, raw.tensors[WEIGHT], bert, wishes.vocab_size)
    shapes = {
        spec.name: tuple(spec.shape) for spec in specs_of(model_of(options, raw.folder))
    }
    # Padding of the vocabulary is cut off after the names are checked.
    tensors = {
        kind: _tied_once(stored, kind, shapes, raw)
        for kind, stored in raw.tensors.items()
    }
    unused = _check_names(tensors[WEIGHT], shapes, raw, wishes)
    tensors = {
        kind: _cut(stored, shapes, kind, raw) for kind, stored in tensors.items()
    }
    # Masters replace the weights, and must agree with them when they are read.
    weights = {
        **tensors[WEIGHT],
        **{
            name: compared_with(tensors[WEIGHT][name], master, WRONG_MASTER)
            for name, master in tensors.pop(MASTER, {}).items()
        },
    }
    moments = {kind: tensors[kind] for kind in MOMENTS if tensors.get(kind)}
    # Without moments the checkpoint holds weights alone; otherwise moments must be complete.
    if wishes.weights_only or not moments:
        moments = {}
    else:
        _check_moments(weights, moments, raw)
    return LogicalCheckpoint(
        raw.folder,
        options,
        {WEIGHT: weights, **moments},
        raw.progress,
        "adam" if moments else None,
        training_options(raw.settings),
        source={"format": format_name, "iteration": raw.progress.iteration},
        ignored=tuple(name for name in raw.ignored if name != ARGUMENTS),
        unused=unused,
    )


def _check_moments(
    weights: Mapping[str, StoredTensor],
    moments: Mapping[str, Mapping[str, StoredTensor]],
    raw: RawCheckpoint,
) -> None:
    """Raises CheckpointError if a trained weight has no moment of one of the kinds."""
    for kind in MOMENTS:
        trained = {name for name in weights if not name.endswith(UNTRAINED)}
        if absent := sorted(trained - moments.get(kind, {}).keys()):
            raise CheckpointError(
                f"{raw.folder}: {len(absent)} tensors have no {kind}: {listing(absent)}. "
                "Their optimizer would start from zero. To load the weights alone, give "
                "--no-optim (in training, --no-load-optim)."
            )


def _tied_once(
    stored: Mapping[str, StoredTensor],
    kind: str,
    shapes: Mapping[str, tuple],
    raw: RawCheckpoint,
) -> dict[str, StoredTensor]:
    """Return the tensors without the head of a tied model. Reading the embedding compares it with that copy."""
    if HEAD not in stored or HEAD in shapes:
        return dict(stored)
    embedding = stored.get(EMBEDDING)
    head = stored[HEAD]
    rest = {name: tensor for name, tensor in stored.items() if name != HEAD}
    if embedding is None or kind not in (WEIGHT, MASTER):
        return rest
    if embedding.shape != head.shape:
        raise CheckpointError(
            f"{raw.folder}: the arguments describe tied embeddings, and {head.place} has "
            f"shape {list(head.shape)}, {embedding.place} {list(embedding.shape)}."
        )

    def read() -> torch.Tensor:
        values = embedding.read()
        if not torch.equal(values, head.read()):
            raise CheckpointError(
                f"{raw.folder}: the arguments describe tied embeddings, and {head.place} "
                f"differs from {embedding.place}. The files are not of one save, or the "
                "model has --untie-embeddings-and-output-weights."
            )
        return values

    return rest | {EMBEDDING: replace(embedding, read=read)}


def _check_names(
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple],
    raw: RawCheckpoint,
    wishes: Wishes,
) -> tuple[str, ...]:
    """Return the names of tensors that the model does not use and the user allows. Raises CheckpointError for
    other such names, and for missing tensors."""
    absent = [name for name in shapes if name not in stored]
    if absent:
        raise CheckpointError(
            f"{raw.folder}: {len(absent)} tensors are missing: {listing(absent)}. Files of "
            "a rank are missing, or the model is another one."
        )
    extra = [name for name in stored if name not in shapes]
    if refused := [name for name in extra if not matches(name, wishes.allow_unused)]:
        raise CheckpointError(
            f"{raw.folder}: {len(refused)} tensors have no place in the model: "
            f"{listing(refused)}. Without them it computes something else. Allow that: "
            "--allow-unused PATTERN."
        )
    return tuple(extra)


def _cut(
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple],
    kind: str,
    raw: RawCheckpoint,
) -> dict[str, StoredTensor]:
    """Return the tensors of the model, without padding of the vocabulary. Raises CheckpointError for tensors of
    another shape."""
    found = {}
    wrong = []
    # All tensors of another shape are reported at once.
    for name, tensor in stored.items():
        if name not in shapes:
            continue
        if name in VOCABULARY and tensor.shape[:1] > shapes[name][:1]:
            tensor = first_rows(tensor, shapes[name][0])
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(
                f"{tensor.place}: {kind} {name} is stored as {tensor.dtype}, of which the "
                "values are not known (fp8 weights or --store-param-remainders). Save in "
                "Megatron-LM without them."
            )
        if tensor.shape != shapes[name]:
            wrong.append(
                f"{kind} {name} is {list(tensor.shape)} and not {list(shapes[name])}"
            )
        found[name] = tensor
    if wrong:
        raise CheckpointError(
            f"{raw.folder}: {len(wrong)} tensors do not have the shape that the arguments "
            f"describe: {listing(wrong, '; ')}. The files are of another model, or mixed "
            "up."
        )
    return found


# ---- Progress and training.

# Our options without which the optimizer does not continue → the argument.
TRAINING = {
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.adam_beta1": "adam_beta1",
    "optimizer.adam_beta2": "adam_beta2",
    "optimizer.adam_eps": "adam_eps",
    "optimizer.clip_grad": "clip_grad",
    "optimizer.min_lr": "min_lr",
}
# Our option that is true or false → the argument, which the parameter groups of the optimizer may have, too.
CHOICES = {
    "optimizer.adam_bias_correction": "bias_correction",
    "optimizer.decoupled_weight_decay": "decoupled_weight_decay",
}


def training_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the optimizer that the files record."""
    numbers = {
        path: float(args[name])
        for path, name in TRAINING.items()
        if isinstance(args.get(name), int | float)
        and not isinstance(args.get(name), bool)
    }
    return numbers | {
        path: args[name]
        for path, name in CHOICES.items()
        if isinstance(args.get(name), bool)
    }


def with_choices(
    args: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Arguments, with `CHOICES` as the parameter groups of the optimizer have them."""
    chosen = dict(args)
    for group in groups:
        chosen |= {name: group[name] for name in CHOICES.values() if name in group}
    return chosen


def iteration_in(content: Mapping[str, Any], place: object) -> int:
    """Return the iteration that a file records; 0 without one. Raises CheckpointError for anything but a count."""
    value = content.get("iteration") or 0
    if type(value) is not int or not 0 <= value < 2**48:
        raise CheckpointError(
            f"{place} records the iteration {value!r}, which is no count. It is damaged."
        )
    return value


def progress_of(
    args: Mapping[str, Any],
    iteration: int,
    updates: int | None,
    scaler: Mapping[str, Any],
) -> StoredProgress:
    """Return how far the training is. updates: steps of Adam; scaler: state of Megatron's loss scaler."""
    samples = args.get("consumed_train_samples")
    if samples is None and args.get("global_batch_size"):
        samples = iteration * args["global_batch_size"]
    length = args.get("seq_length")
    skipped = args.get("skipped_train_samples")
    return StoredProgress(
        iteration,
        samples,
        samples * length if samples is not None and length else None,
        None if updates is None or skipped is None else max(iteration - updates, 0),
        updates,
        _scaler(scaler),
    )


def _scaler(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss scaler's numbers for run.json. Megatron counts good steps since the scale changed, ours
    since an overflow."""
    scale = number(state.get("scale"))
    if scale is None:
        return {}
    return {
        "loss_scale": float(scale),
        "loss_scale_lives": int(state.get("hysteresis_tracker", 1)),
        "loss_scale_iteration": int(state.get("growth_tracker", 0)),
        "loss_scale_last_overflow": -1,
    }


def number(value: Any) -> float | None:
    """Return a number, also one that is stored as a tensor."""
    if isinstance(value, StoredTensor):
        return float(value.read().reshape(-1)[0]) if value.shape in ((), (1,)) else None
    return value if isinstance(value, int | float) else None


def adam_updates(states: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the steps of Adam: the largest `step` in parameter groups and states. None if none is recorded."""
    steps = [number(state.get("step")) for state in states]
    return max((int(step) for step in steps if step is not None), default=None)
