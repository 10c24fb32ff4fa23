"""`DistillationConfig`: the options of distillation."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option

TEACHER = need("distillation.distill_from")


@dataclass(frozen=True)
class DistillationConfig:
    """Off unless --distill-from is given."""

    distill_from: str | None = option(
        None,
        help="Train the model to predict what the model in this folder, the teacher, predicts for the same tokens: a "
        "checkpoint of this package or of another program, of any size, with the same vocabulary. It is loaded once "
        "and frozen, has the layout of the run, and is not saved.",
        avoid="A step computes the forward of the teacher, too.",
    )
    distill_weight: float = option(
        0.5,
        above=0,
        at_most=1,
        needs=TEACHER,
        help="Weight A of the divergence from the teacher; the loss is (1 - A) × language loss + A × T² × divergence, "
        "with the temperature T.",
    )
    distill_temperature: float = option(
        1.0,
        above=0,
        needs=TEACHER,
        help="Divisor of the logits of both models before the divergence. A larger number gives the tokens that the "
        "teacher finds unlikely more weight.",
    )
    distill_divergence: str = option(
        "forward",
        choices=("forward", "reverse"),
        needs=TEACHER,
        help="forward: KL(teacher, student), for a student that gives probability to all that the teacher predicts; "
        "reverse: KL(student, teacher), for one that predicts nothing which the teacher finds unlikely.",
    )
    distill_top_k: int | None = option(
        None,
        at_least=1,
        needs=TEACHER,
        help="Compare the teacher's K likeliest tokens one by one, and all others as one. A step then keeps 8 K + 4 "
        "bytes of each token. Default: the whole vocabulary, for which a step keeps the teacher's last hidden states "
        "and computes its logits again.",
    )

    @property
    def folder(self) -> str:
        """The folder of the teacher, where there is one."""
        assert self.distill_from is not None, (
            "without --distill-from there is no teacher"
        )
        return self.distill_from

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return self.distill_from is not None
