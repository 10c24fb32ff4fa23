"""`LoraConfig`: the options of low-rank adapters, by peft's names of their values."""

from dataclasses import dataclass
from typing import Any

from ...config.added_weights import AddedWeights
from ...config.options.need import need
from ...config.options.option import option
from .targets import ALL_LINEAR, LAYERS, TARGETS, Target

NOUN = "adapters"
LORA = need("adapters.lora_rank")


@dataclass(frozen=True)
class LoraConfig:
    """Off unless --lora-rank is given."""

    lora_rank: int | None = option(
        None,
        at_least=1,
        help="Train adapters of this rank beside the linear layers of --lora-target-modules, and nothing else: the "
        "model's own weights are frozen, have no gradient and no optimizer state, and are not saved. They are those "
        "of --pretrained-checkpoint; without it, the initial ones.",
    )
    lora_alpha: float | None = option(
        None,
        above=0,
        needs=LORA,
        help="The output of an adapter is multiplied by this number / rank. Default: the rank, for a factor of 1.",
    )
    lora_dropout: float = option(
        0.0,
        at_least=0,
        below=1,
        needs=LORA,
        help="Probability with which an element of the input of an adapter is set to 0 in training.",
    )
    use_dora: bool = option(
        False,
        needs=LORA,
        help="DoRA: train the magnitude of each row of a weight and its adapters too, apart from the direction, which "
        "is that of their sum.",
    )
    lora_base_bits: int | None = option(
        None,
        choices=(4, 8),
        needs=LORA,
        help="QLoRA: keep the frozen weights of linear layers in 8 bits (integers) or 4 bits (NF4), with a scale for "
        "each 64 numbers. A layer's weights are decoded when it runs, forward and backward.",
    )
    lora_target_modules: tuple[str, ...] = option(
        LAYERS,
        choices=(*TARGETS, ALL_LINEAR),
        needs=LORA,
        separators=",",
        help="Layers that have an adapter. linear_qkv and linear_fc1 have one for their packed rows; q_proj, k_proj, "
        "v_proj, gate_proj and up_proj one each for their own, as Hugging Face's models. The layers of experts "
        "have one for each expert.",
    )

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.lora_rank is not None

    @property
    def added(self) -> AddedWeights | None:
        """The adapters, as the core knows them; None without --lora-rank."""
        if not self.is_on:
            return None
        return AddedWeights(
            NOUN, self.identity(), self.lora_base_bits, self.lora_dropout
        )

    @property
    def rank(self) -> int:
        """The rank of the adapters, where there are any."""
        assert self.lora_rank is not None, "without --lora-rank there are no adapters"
        return self.lora_rank

    @property
    def scale(self) -> float:
        """The factor of the output of an adapter."""
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the targets, in the order of the table, each target once and by its first name."""
        given = self.lora_target_modules
        if ALL_LINEAR in given:
            given = (*given, *LAYERS)
        chosen = {TARGETS[name] for name in given if name != ALL_LINEAR}
        names: dict[Target, str] = {}
        for name, target in TARGETS.items():
            if target in chosen:
                names.setdefault(target, name)
        return tuple(names.values())

    def identity(self) -> dict[str, Any]:
        """Rank, factor and targets of the adapters; also whether they have magnitudes, if so."""
        about = {
            "rank": self.lora_rank,
            "scale": self.scale,
            "targets": sorted(self.targets),
        }
        return about | {"dora": True} if self.use_dora else about
