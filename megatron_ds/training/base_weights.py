"""Weights of --pretrained-checkpoint.

of a run that trains them            it starts from them where its --load has no checkpoint, at the first step; later
                                     starts of the same command continue the run's own checkpoints
of one that trains weights beside    the frozen weights of every start are these, and --load has the added ones alone
them (`AddedWeights`)
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

from ..checkpoint.folder import TRACKER, name_of
from ..checkpoint.load import load
from ..checkpoint.pieces import WEIGHT
from ..checkpoint.place import absolute
from ..checkpoint.run_file import PARTS
from ..config import RunConfig, Source
from ..config.options.training import CheckpointConfig
from ..errors import CheckpointError, MismatchError
from ..mpu.agree import on_all_ranks, on_one_rank
from ..mpu.group import Group
from .build import Replica
from .foreign_checkpoints import foreign_checkpoints
from .found_checkpoints import has_checkpoint
from .run_checkpoint import check_same_run, frozen_pieces
from .start import Start, known_folder
from .start_folder import check_may_start, find_weights

logger = logging.getLogger(__name__)
FLAG = "--pretrained-checkpoint"
PRETRAINED = Source("derived", FLAG)


def started_from_pretrained(config: RunConfig, world: Group) -> RunConfig:
    """Return the configuration of this start: without a checkpoint in --load, that of a run which finetunes the
    weights.

    Added weights are always loaded from --load. Collective over the world. Raises CheckpointError if the folder has no
    weights, or if --load is given, has no checkpoint, and is not --save.
    """
    checkpoint = config.checkpoint
    if checkpoint.pretrained_checkpoint is None or config.added_weights is not None:
        return config
    found = lambda: has_checkpoint(checkpoint.load, checkpoint.load_format)
    if on_one_rank(world, found):
        return config
    if checkpoint.load is not None:
        on_one_rank(world, lambda: check_may_start(checkpoint))
    whole = of_weights(config)
    on_one_rank(world, lambda: find_weights(whole.checkpoint))
    return whole


def of_weights(config: RunConfig) -> RunConfig:
    """Return the configuration with the pretrained folder as --load, of which weights alone are taken."""
    checkpoint = config.checkpoint
    values = {
        "checkpoint.load": checkpoint.pretrained_checkpoint,
        "checkpoint.finetune": True,
    }
    # The format is that of --load, where both are given.
    if checkpoint.load is not None:
        values["checkpoint.load_format"] = None
    return config.with_values(values, PRETRAINED)


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights below the added ones of a run.

    checkpoint  the options that load them
    foreign     the checkpoint, if another program wrote it
    """

    checkpoint: CheckpointConfig
    start: Start
    foreign: Any

    @property
    def identity(self) -> dict[str, Any]:
        """The checkpoint, for run.json: its folder, and its run and step where they are known."""
        about: dict[str, Any] = {"folder": absolute(known_folder(self.checkpoint.load))}
        if self.start.step is not None:
            about |= {"run_id": self.start.run_id, "step": self.start.step}
        return about


def find_base(config: RunConfig, description: dict, world: Group) -> BaseWeights | None:
    """Return the weights below the added ones; None where none are added, and where they are initial ones.

    description: the values of run.json of this run. Collective over the world. Raises CheckpointError if the folder
    has no weights, or those of another model.
    """
    if config.added_weights is None or config.checkpoint.pretrained_checkpoint is None:
        return None
    below = of_weights(config)
    checkpoint = below.checkpoint
    start = on_one_rank(world, lambda: find_weights(checkpoint))
    if start.step is not None:
        whole = description | {"identity": _of_whole_model(description["identity"])}
        on_all_ranks(world, lambda: check_same_weights(start.run, whole, checkpoint))
    foreign = on_all_ranks(
        world,
        lambda: foreign_checkpoints(below.checkpoint.load).read(below, start.foreign),
    )
    return BaseWeights(checkpoint, start, foreign)


def checked_base(
    config: RunConfig, description: dict, start: Start, is_own: bool, world: Group
) -> BaseWeights | None:
    """Return the weights below the added ones, as `find_base`, of a run whose checkpoint is that of the same run.

    start: what the run loads. is_own: from the --load folder that the user gave. Collective over the world. Raises
    MismatchError where data, model or base differ from those of the checkpoint.
    """
    checkpoint = config.checkpoint
    if start.step is not None:
        check = check_same_run if is_own else check_same_weights
        on_all_ranks(world, lambda: check(start.run, description, checkpoint))
    base = find_base(config, description, world)
    if start.step is not None:
        on_all_ranks(world, lambda: check_same_base(start.run, base, config))
    return base


def check_same_weights(
    saved: dict, current: dict, checkpoint: CheckpointConfig
) -> None:
    """`check_same_run`, whose error names the flag of these weights."""
    try:
        check_same_run(saved, current, checkpoint)
    except CheckpointError as error:
        text = str(error)
        for words in (f"--load {checkpoint.load}:", "another --load"):
            text = text.replace(words, words.replace("--load", FLAG))
        raise MismatchError(text) from None


def _of_whole_model(identity: dict) -> dict:
    return {name: identity[name] for name in PARTS}


def load_base(replica: Replica, base: BaseWeights) -> None:
    """Fill the frozen weights. Collective over the world."""
    pieces = frozen_pieces(replica)
    mesh = replica.mesh
    if base.foreign is not None:
        foreign_checkpoints(base.checkpoint.load).load(
            replica, base.foreign, pieces, base.checkpoint
        )
        return
    begin = time.perf_counter()
    # Of this package.
    step = base.start.step
    assert step is not None, "find_base found a checkpoint of this package"
    load(
        known_folder(base.checkpoint.load),
        step,
        pieces,
        coordinates=mesh.coordinates,
        world=mesh.group("world"),
        kinds=(WEIGHT,),
        exact=False,  # frozen weights in 16 bits have no fp32 copies
    )
    replica.optimizer.after_load()
    if mesh.rank == 0:
        logger.info(
            "loaded the frozen weights from %s, iteration %d, in %.1f s",
            base.checkpoint.load,
            step,
            time.perf_counter() - begin,
        )


def check_same_base(saved: dict, base: BaseWeights | None, config: RunConfig) -> None:
    """Raises MismatchError if added weights were trained on other ones. saved: the values of their run.json."""
    noun = "weights" if config.added_weights is None else config.added_weights.noun
    before = saved.get("base")
    now = None if base is None else base.identity
    if (before is None) != (now is None):
        raise MismatchError(_other_base(noun, before, now))
    if before is None or now is None or "step" not in before or "step" not in now:
        return
    if (before["run_id"], before["step"]) != (now["run_id"], now["step"]):
        raise MismatchError(_other_base(noun, before, now))


def _other_base(noun: str, before: dict | None, now: dict | None) -> str:
    name = lambda about: "initial weights" if about is None else _words(about)
    return (
        f"the {noun} were trained beside {name(before)}, and this run has {name(now)}: their sum would be another "
        f"model. {_change(before)}"
    )


def _change(before: dict | None) -> str:
    """Return what to do for the weights of `before`, whose folder may have later ones by now."""
    if before is None:
        return "Remove --pretrained-checkpoint."
    folder = before["folder"]
    if "step" not in before:
        return f"Give --pretrained-checkpoint {folder}."
    step = before["step"]
    return (
        f"Give --pretrained-checkpoint {folder}. If its run has trained on, copy {name_of(step)} from there into a new "
        f"folder, write {step} into the file {TRACKER} beside it, and give that folder."
    )


def _words(about: dict) -> str:
    step = f", iteration {about['step']}" if "step" in about else ""
    return f"the weights of {about['folder']}{step}"
