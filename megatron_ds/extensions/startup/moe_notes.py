"""Notes for startup: where layers with experts differ from those of Megatron and DeepSpeed.

A note is one sentence about a difference that these flags do meet: Megatron-DeepSpeed's defaults are named
only where one of its own spellings was used. Notes are written as rules are; see `messages.problems_of`.
"""

from collections.abc import Iterator

from ...config.messages import Rule, problems_of
from ...config.run import RunConfig

# Flags of Megatron-DeepSpeed that Megatron does not have.
OF_DEEPSPEED = (
    "--topk",
    "--expert-interval",
    "--mlp-type",
    "--moe-expert-parallel-size",
    "--moe-loss-coeff",
    "--moe-train-capacity-factor",
    "--moe-eval-capacity-factor",
    "--moe-min-capacity",
    "--disable-moe-token-dropping",
)


def moe_notes(config: RunConfig) -> list[str]:
    """Return the notes on a configuration without problems; none without experts."""
    return list(problems_of(NOTES, config)) if config.model.num_experts else []


def from_deepspeed(config: RunConfig) -> bool:
    """Return whether a flag was spelled as in Megatron-DeepSpeed only."""
    return any(source.name in OF_DEEPSPEED for source in config.sources.values())


def defaults(config: RunConfig) -> Iterator[str]:
    """Yield the defaults of Megatron-DeepSpeed that differ."""
    model = config.model
    given = config.sources
    if not from_deepspeed(config):
        return
    if model.expert_interval is None and "model.moe_layer_freq" not in given:
        yield "every layer has experts; Megatron-DeepSpeed's default is --expert-interval 2"
    if "model.moe_router_topk" not in given:
        yield "a token has 2 experts; Megatron-DeepSpeed's default is --topk 1"
    if model.moe_token_dropping and model.moe_expert_capacity_factor is None:
        yield (
            "no token is dropped; Megatron-DeepSpeed's defaults are --moe-train-capacity-factor 1, "
            "--moe-eval-capacity-factor 1 and --moe-min-capacity 4"
        )
    elif model.moe_token_dropping and "model.moe_min_capacity" not in given:
        yield "an expert has no least capacity; Megatron-DeepSpeed's default is --moe-min-capacity 4"


def capacity(config: RunConfig) -> Iterator[str]:
    """Yield notes on the tokens that compete for an expert, and on the tokens that find it full."""
    # Without a factor no token is dropped.
    model = config.model
    factor = config.source("model.moe_expert_capacity_factor")
    if model.moe_expert_capacity_factor is None:
        return
    if model.moe_capacity_scope == "sequence":
        yield (
            "the tokens of a sequence compete for the capacity of an expert, on every layout; in Megatron "
            "and DeepSpeed those of a rank do"
        )
    if model.moe_eval_capacity_factor is None:
        usual = (
            "Megatron-DeepSpeed's default is 1"
            if from_deepspeed(config)
            else (f"in Megatron {factor} applies there too")
        )
        yield (f"evaluation drops no token without --moe-eval-capacity-factor; {usual}")
    # Users of Megatron's flags expect no gates of DeepSpeed.
    if not from_deepspeed(config):
        return
    if model.moe_router_topk == 1:
        yield (
            "a full expert keeps the tokens of the largest weights; DeepSpeed's top-1 gate keeps random "
            "ones of a rank"
        )
    else:
        yield (
            "the weights of a token whose expert is full stay as they are; DeepSpeed divides them by the "
            "sum of the remaining ones"
        )


def balance(config: RunConfig) -> Iterator[str]:
    """Over which tokens the load is balanced."""
    model = config.model
    kinds = model.moe_router_load_balancing_type
    weights = model.moe_aux_loss_coeff
    if (
        not any(weights)
        and not model.moe_router_enable_expert_bias
        and model.moe_choice == "top-k"
    ):
        usual = (
            "; Megatron-DeepSpeed's default is 0.1" if from_deepspeed(config) else ""
        )
        yield (
            "nothing balances the load of the experts, which may leave most of them without tokens: see "
            f"--moe-aux-loss-coeff{usual}"
        )
    if any(weights) and "global_aux_loss" in kinds:
        yield (
            "global_aux_loss uses the load of the previous step; in Megatron it uses that of the "
            "micro-batches so far, and depends on their order"
        )
    if any(weights) and from_deepspeed(config):
        yield (
            "the balancing loss is that of a micro-batch and counts all experts of a token; in DeepSpeed "
            "it is that of a rank's tokens, and up to --topk 2 counts the first expert only"
        )


def choice(config: RunConfig) -> Iterator[str]:
    """Noise in the choice."""
    model = config.model
    if (
        from_deepspeed(config)
        and model.moe_router_topk == 2
        and model.moe_router_noise == "none"
    ):
        yield (
            "the second expert of a token is the second best; DeepSpeed chooses it with noise, unless "
            "--disable-moe-top2-2nd-expert-sampling is given"
        )
    if model.moe_router_noise == "jitter":
        yield "jitter applies in training only; in Megatron in evaluation too"


NOTES: tuple[Rule, ...] = (defaults, choice, balance, capacity)
