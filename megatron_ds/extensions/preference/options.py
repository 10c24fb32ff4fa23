"""`PreferenceConfig`: the options of direct preference optimization."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option

DPO = need("preference.dpo")


@dataclass(frozen=True)
class PreferenceConfig:
    """Off unless --dpo is given."""

    dpo: bool = option(
        False,
        help="Train on pairs of answers (megatron-ds preprocess --preference) with the loss of DPO: the model learns "
        "to prefer the chosen answer to the rejected one by more than its own first weights do. A row holds the two "
        "answers of a pair. Implies --pack-documents; and --hidden-dropout 0 and --attention-dropout 0 where they are "
        "not given, since the reference has no dropout.",
        avoid="Answers that do not fit into a row together lose their end.",
    )
    dpo_beta: float = option(
        0.1,
        above=0,
        needs=DPO,
        help="Reward of an answer for each unit by which its log-probability rises above that under the reference. A "
        "larger number keeps the model closer to the reference.",
    )
    dpo_label_smoothing: float = option(
        0.0,
        at_least=0,
        below=0.5,
        needs=DPO,
        help="Share of the pairs whose answers are believed to be in the wrong order.",
    )

    @property
    def is_on(self) -> bool:
        """Whether the run trains on pairs."""
        return self.dpo
