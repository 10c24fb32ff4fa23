"""DeepSpeed's data efficiency: `CurriculumConfig` (short sequences or easy samples first) and
`RandomLTDConfig`.

A curriculum over lengths (`--curriculum-type`) is given with flags or with the legacy block
"curriculum_learning". A curriculum over samples has a block for each metric, as in "data_efficiency"; each
block is kept as a JSON string.
"""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option
from ...progress.kept_tokens import KeptTokens

# DeepSpeed's names of such metrics
TRUNCATE = "seqlen_truncate"
RESHAPE = "seqlen_reshape"
# How a difficulty grows: the kinds of difficulty.py.
SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_LTD = "data_efficiency.data_routing.random_ltd"


@dataclass(frozen=True)
class CurriculumConfig:
    """Off unless --curriculum-type or --curriculum-metrics is given; both may be."""

    curriculum_type: str | None = option(
        None,
        choices=(TRUNCATE, RESHAPE),
        values={"seqlen": TRUNCATE},
        help="Train on short sequences first: seqlen_truncate drops the rest of each sample, seqlen_reshape "
        "folds it into more rows.",
        avoid="Truncation needs more samples for the same tokens. Evaluation is always at full length.",
    )
    curriculum_schedule: str = option(
        "fixed_linear", choices=SCHEDULES, help="How the length grows."
    )
    curriculum_min_length: int | None = option(
        None, at_least=1, unit="tokens", help="Length of the first step."
    )
    curriculum_max_length: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        help="Length at the end of the curriculum. Default: --seq-length.",
    )
    curriculum_steps: int | None = option(
        None,
        at_least=1,
        unit="steps",
        help="Steps until the largest length is reached (fixed_linear, fixed_root).",
    )
    curriculum_length_step: int = option(
        8,
        at_least=1,
        unit="tokens",
        help="The length is a multiple of this (fixed_linear, fixed_root).",
        avoid="Multiples of 8 are fast on GPUs; each new length costs some memory and a search for kernels.",
    )
    curriculum_root_degree: float | None = option(
        None,
        above=0,
        help="Degree of the root: with 2 the length grows with the square root of the steps (fixed_root).",
    )
    curriculum_lengths: tuple[int, ...] = option(
        (), at_least=1, unit="tokens", help="The lengths, in order (fixed_discrete)."
    )
    curriculum_until_steps: tuple[int, ...] = option(
        (),
        at_least=1,
        unit="steps",
        help="The last step of each length except the last (fixed_discrete).",
    )
    curriculum_function: str | None = option(
        None,
        help="package.module:function from the step, counted from 1, to the length (custom).",
        avoid="If it depends on anything else, a resumed run differs.",
    )
    curriculum_metrics: tuple[str, ...] = option(
        (),
        help='Easy samples first: for each metric, a block of "curriculum_metrics" with its "name" '
        "inside, as JSON text. Easier to write in a DeepSpeed JSON.",
        avoid="It needs an analysis by megatron-ds analyze.",
    )
    curriculum_cluster_path: str | None = option(
        None,
        per_host=True,
        help="Directory for the samples that several metrics admit. Default: --data-cache-path, or next to "
        "the first index.",
    )
    data_efficiency_seed: int = option(
        1234, at_least=0, help="Seed of the order in which a curriculum draws samples."
    )

    @property
    def changes_lengths(self) -> bool:
        """Whether sequences are shorter than samples in some steps."""
        return self.curriculum_type is not None

    @property
    def orders_samples(self) -> bool:
        """Whether there is an order of the samples of one epoch."""
        return bool(self.curriculum_metrics)

    @property
    def longest_stated(self) -> int:
        """The longest length that options name, which a sample must have."""
        return max(self.curriculum_min_length or 0, self.curriculum_max_length or 0)


@dataclass(frozen=True)
class RandomLTDConfig:
    """Random layer-wise token dropping: blocks process a growing subset of the tokens."""

    random_ltd: bool = option(
        False,
        help="Let some blocks process only a random subset of the tokens, which grows during training "
        "(random-LTD).",
        avoid="It changes what is trained. Compare losses on a small run first.",
    )
    random_ltd_total_layers: int | None = option(
        None,
        at_least=1,
        json=f"{_LTD}.total_layer_num",
        needs=need("random_ltd.random_ltd"),
        help="Require this number of blocks: any other number of layers is an error.",
        avoid="Not needed: the number is known from the model.",
    )
    random_ltd_layer_ids: tuple[int, ...] = option(
        (),
        at_least=0,
        json=f"{_LTD}.random_ltd_layer_id",
        needs=need("random_ltd.random_ltd"),
        help="Numbers of the blocks that drop tokens, from 0. Default: all except the first and the last.",
    )
    random_ltd_min_tokens: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        json=f"{_LTD}.random_ltd_schedule.min_value",
        needs=need("random_ltd.random_ltd"),
        help="Tokens of each sequence that these blocks keep in the first step.",
    )
    random_ltd_max_tokens: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        json=f"{_LTD}.random_ltd_schedule.max_value",
        needs=need("random_ltd.random_ltd"),
        help="Tokens of each sequence that these blocks keep at the end. Default: the sequence length.",
        avoid="With fewer, the run never trains on the whole sequences that it is evaluated on.",
    )
    random_ltd_steps: int | None = option(
        None,
        at_least=1,
        unit="steps",
        json=f"{_LTD}.random_ltd_schedule.schedule_config.require_steps",
        needs=need("random_ltd.random_ltd"),
        help="Steps over which the number of kept tokens grows linearly. Two thirds of the run is a good "
        "starting point.",
    )
    random_ltd_tokens_per_step: int = option(
        16,
        at_least=1,
        unit="tokens",
        json=f"{_LTD}.random_ltd_schedule.schedule_config.seq_per_step",
        needs=need("random_ltd.random_ltd"),
        help="The number of kept tokens is rounded down to a multiple of this.",
        avoid="Kernels are fastest with multiples of 64 on GPUs, of 8 on CPUs.",
    )

    @property
    def longest_stated(self) -> int:
        """The largest number of tokens that options name, which a sequence must have."""
        return max(self.random_ltd_min_tokens or 0, self.random_ltd_max_tokens or 0)

    def kept_tokens(self, num_blocks: int, seq_length: int) -> KeptTokens | None:
        """Return the blocks and their tokens; None without --random-ltd."""
        least = self.random_ltd_min_tokens
        steps = self.random_ltd_steps
        # Rules require the two.
        if not self.random_ltd or least is None or steps is None:
            return None
        from .difficulty import Rise

        # lowest=0: DeepSpeed rounds down below the minimum if that is not a multiple, and the integers are to
        # be equal.
        kept = Rise(
            least,
            self.random_ltd_max_tokens or seq_length,
            steps,
            self.random_ltd_tokens_per_step,
            lowest=0,
        )
        return KeptTokens(
            self.dropping_blocks(num_blocks),
            num_blocks,
            kept,
            title="random ltd reserved length",
        )

    def dropping_blocks(self, num_layers: int) -> tuple[int, ...]:
        """Numbers of the blocks that drop tokens; by default all but the first and the last."""
        return tuple(sorted(self.random_ltd_layer_ids)) or tuple(
            range(1, num_layers - 1)
        )
