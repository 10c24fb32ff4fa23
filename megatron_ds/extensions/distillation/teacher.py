"""`Teacher`: a frozen model in the layout of a run, which predicts the tokens of the micro-batches of a step.

Its forward of all micro-batches comes before the student's step, as a program of its own: so every schedule of the
student remains as it is, and the teacher's activations are gone when the student's begin. Its predictions are kept on
the ranks of the last stage, where the loss of the student is.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ...batch.batch import Batch
from ...config import RunConfig
from ...data.tokenizers import Tokenizer
from ...errors import CheckpointError, ConfigError
from ...mpu.group import Group
from ...ops.logits import row_parts
from ...progress.ramps import Progress
from ...tensor_parallel.logits_in_chunks import LogitsInChunks
from ...tensor_parallel.logits_in_parts import Logits, width_of
from ...tensor_parallel.token_loss import Parts
from ...training.build import Replica
from ...training.loaders import Loaders
from ...training.objective import Prepare
from ...training.run_start import find_start
from ...training.start import Start
from ..evaluation.checkpoint_model import built_and_loaded
from .divergence import Columns, TeacherTokens
from .likeliest_tokens import LikeliestTokens, likeliest_tokens
from .options import DistillationConfig
from .teacher_config import check_tokens, of_teacher, teacher_config
from .whole_teacher import WholeTeacher

logger = logging.getLogger(__name__)


class Teacher:
    """replica: of the frozen model; keep: its last output and the batch → what is kept of it."""

    def __init__(
        self, replica: Replica, keep: Callable[[Logits, Batch], TeacherTokens]
    ):
        self.replica = replica
        self.keep = keep

    def taught(self, microbatches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches of a step with the teacher's predictions, on the ranks of the last stage; the same
        elsewhere. Collective over the ranks of the pipeline and of tensor parallelism."""
        stages = self.replica.stages
        read = [
            replace(batch, training=False, kept_tokens=None) for batch in microbatches
        ]
        self._release()
        with ExitStack() as inside:
            for stage in stages.values():
                inside.enter_context(stage.computing(self.keep))
            found = self.replica.executor.forward(read)
        if not found:
            return microbatches
        return tuple(
            replace(batch, reference=tokens)
            for batch, tokens in zip(microbatches, found, strict=True)
        )

    def _release(self) -> None:
        """Free the layer that ZeRO 3 kept gathered after the last step, whose loss may have read it."""
        for stage in self.replica.stages:
            if gathering := self.replica.optimizer.gathering_of(stage):
                gathering.reset()


def teach(student: Replica, replica: Replica) -> None:
    """Let the model of `replica` predict before every step of the student. Both share a mesh."""
    config = student.config
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "the tokenizer has given it"
    options = config.of(DistillationConfig)
    keep = keeper(options, vocab_size, student.mesh.group("tp"))
    student.executor.prepare = Teacher(replica, keep).taught


def keeper(
    options: DistillationConfig, vocab_size: int, tp: Group
) -> Callable[[Logits, Batch], TeacherTokens]:
    """Return what is kept of the output of a teacher's last layer."""
    count = options.distill_top_k
    if count is None:
        return whole
    return partial(
        likeliest,
        count=count,
        tp=tp,
        vocab_size=vocab_size,
        temperature=options.distill_temperature,
    )


def whole(logits: Logits, batch: Batch) -> WholeTeacher:
    """Return what the logits are computed from. `batch` is not used."""
    assert isinstance(logits, LogitsInChunks), (
        "the teacher of a whole vocabulary has its logits in chunks"
    )
    return WholeTeacher(
        logits.x, logits.weight, logits.bias, logits.sequence_parallel, logits.cap
    )


def likeliest(
    logits: Logits,
    batch: Batch,
    *,
    count: int,
    tp: Group,
    vocab_size: int,
    temperature: float,
) -> LikeliestTokens:
    """Return the likeliest tokens of each row. Collective over tp."""
    columns = Columns(width_of(logits), tp, vocab_size, temperature)
    return likeliest_tokens(_parts_of(logits), columns, count)


def _parts_of(logits: Logits) -> Parts:
    if isinstance(logits, LogitsInChunks):
        return logits.parts()
    return row_parts(logits.flatten(0, -2))


def open_teacher(config: RunConfig, tokenizer: Tokenizer) -> Prepare:
    """Return what builds and loads the teacher. Raises for a folder without a teacher that suits the run."""
    teacher = teacher_config(config)
    check_tokens(config.of(DistillationConfig).folder, tokenizer)
    return partial(_prepare, teacher, tokenizer)


def _prepare(
    config: RunConfig,
    tokenizer: Tokenizer,
    student: Replica,
    loaders: Loaders,
    start: Start,
    description: dict,
    progress: Progress,
) -> dict[str, Any]:
    """Build and load the teacher of `config`. Returns its checkpoint, for run.json. Collective over the world."""
    folder = config.checkpoint.load
    assert folder is not None, "the configuration of a teacher has it"
    begin = time.perf_counter()
    try:
        found = find_start(config.checkpoint, student.mesh.group("world"))
        loaded = built_and_loaded(config, tokenizer, found, student.mesh)
    except (CheckpointError, ConfigError) as error:
        raise of_teacher(error, folder) from None
    teach(student, loaded.replica)
    teacher = {"folder": folder, "step": loaded.iteration}
    if student.mesh.rank == 0:
        seconds = time.perf_counter() - begin
        logger.info("the teacher is %s, loaded in %.1f s", _named(teacher), seconds)
        # A resumed run has the teacher that its checkpoint names.
        is_new = student.config.checkpoint.finetune
        before = None if is_new else start.run.get("teacher")
        if before not in (None, teacher):
            logger.warning(
                "the checkpoint of this run was taught by %s, and the run goes on with %s: its loss is another one "
                "from here on. To keep the teacher, give --distill-from its folder, with its iteration in "
                "latest_checkpointed_iteration.txt there.",
                _named(before),
                _named(teacher),
            )
    return {"teacher": teacher}


def _named(teacher: dict[str, Any]) -> str:
    """Return what run.json has of a teacher, in words."""
    step = teacher["step"]
    return teacher["folder"] + ("" if step is None else f", iteration {step}")
