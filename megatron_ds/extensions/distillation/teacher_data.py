"""The data of a run with a teacher: that of its model, and for plans predictions without values."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...batch.batch import Batch
from ...data.kind import DataKind
from ...planning.run_model import DTYPES, sequence_slice
from .divergence import TeacherTokens
from .likeliest_tokens import LikeliestTokens
from .options import DistillationConfig
from .teacher_config import teacher_config
from .whole_teacher import WholeTeacher

if TYPE_CHECKING:
    from ...config import RunConfig


def with_blank_teacher(own: DataKind, config: "RunConfig") -> DataKind:
    """Return the kind of the data of a run with a teacher."""

    def blank(
        samples: int, positions: int, device: torch.device | str = "cpu"
    ) -> Batch:
        predicted = blank_tokens(config, samples, positions, device)
        return replace(own.blank(samples, positions, device), reference=predicted)

    return replace(own, blank=blank)


def blank_tokens(
    config: "RunConfig", samples: int, positions: int, device: torch.device | str
) -> TeacherTokens:
    """Return the predictions of a teacher for a micro-batch, without values."""
    part = sequence_slice(config)
    count = config.of(DistillationConfig).distill_top_k
    length = part.batch_length(positions)
    if count is not None:
        rows = length * samples
        return LikeliestTokens(
            torch.zeros(rows, count, dtype=torch.int32, device=device),
            torch.zeros(rows, count, device=device),
            torch.zeros(rows, device=device),
        )
    # Hidden states, and the head.
    teacher = teacher_config(config)
    model = teacher.model
    dtype = DTYPES[config.optimizer.params_dtype]
    parallel = config.parallel
    columns = teacher.padded_vocab_size // parallel.tensor_model_parallel_size
    make = lambda *shape: torch.zeros(*shape, dtype=dtype, device=device)
    return WholeTeacher(
        make(*part.hidden_shape(length, samples, model.hidden_size)),
        make(columns, model.hidden_size),
        make(columns) if model.output_layer_bias else None,
        parallel.sequence_parallel,
    )
