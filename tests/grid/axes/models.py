"""What a model computes."""

from collections.abc import Callable

import torch

from tests.harness.covering import Case

from .axis import Axis, Shown
from .optimizers import STEADY, STEADY_ADAGRAD

NORMED = {
    "--qk-layernorm": "",
    "--add-qkv-bias": "",
    "--softmax-type": "off-by-one",
}
WINDOWED = {
    "--window-attn-skip-freq": 2,
    "--softmax-type": "learnable",
    "--softmax-scale": 0.4,
}
CAPPED = {"--attention-logit-softcapping": 0.3, "--final-logit-softcapping": 0.5}
BIGBIRD = {
    "--sparse-attention": "bigbird",
    "--sparse-block": 2,
    "--sparse-num-random-blocks": 1,
    "--sparse-layout-per-head": "",
    "--sparse-num-sliding-window-blocks": 3,
}
FIXED = {
    "--sparse-attention": "fixed",
    "--sparse-block": 4,
    "--sparse-num-local-blocks": 2,
    "--sparse-layout-per-head": "",
    "--sparse-num-different-global-patterns": 2,
}
YARN = {
    "--rotary-interleaved": "",
    "--rotary-percent": 0.5,
    "--kv-channels": 12,
    "--position-embedding-type": "yarn",
    "--original-max-position-embeddings": 12,
}
SCALED = {
    "--use-rope-scaling": "",
    "--rotary-seq-len-interpolation-factor": 2,
    "--original-max-position-embeddings": 12,
}
PARALLEL = {
    "--use-parallel-residual": "",
    "--apply-layernorm-1p": "",
    "--decoupled-lr": "2e-3",
    "--param-group": "*norm*:lr_factor=0.5",
}
ONE_NORM = {
    "--use-parallel-residual": "",
    "--shared-block-norm": "",
    "--disable-bias-in-attn-linear": "",
}
NORMED_TWICE = {"--norm-after-sublayer": "", "--embedding-multiplier": 2.5}

# Adapters of whole layers, and of some of their rows.
LORA = {"--lora-rank": 3, "--lora-alpha": 6}
LORA_DROPPED = LORA | {"--lora-dropout": 0.2}
LORA_ROWS = LORA | {"--lora-target-modules": "q_proj,v_proj,o_proj,down_proj"}

ENCODED = ("int8", "nf4 dora")


def lora(options: dict) -> Callable[[Case], dict]:
    """Half of the matrices begin at 0: an element whose gradient is rounding alone must not move as far as others.

    Blocks whose weights are frozen cost so little that by FLOPs a stage may be the head alone.
    """

    def of_case(case: Case) -> dict:
        steady = STEADY_ADAGRAD if case["optimizer"] == "adagrad" else STEADY
        cut = {"--pipeline-cut": "uniform"} if case["pp"] > 2 else {}
        return options | steady | cut

    return of_case


def dropped(case: Case) -> dict:
    """Experts have adapters too; the tiles of a feed-forward know no positions."""
    linear = "linear_proj" if case["tiles"] > 1 else "linear_proj,linear_fc1,linear_fc2"
    targets = {"--lora-target-modules": f"k_proj,{linear}"}
    return lora(LORA_DROPPED | targets)(case)


def window(case: Case) -> dict:
    """A BERT sees tokens on both sides; a Llama rotates within windows by other angles."""
    size = "5,3" if case["style"] == "bert" else "5,0"
    angles = {"--window-rotary-base": 100} if case["style"] == "llama" else {}
    return WINDOWED | angles | {"--window-size": size}


def dtypes(shown: Shown) -> None:
    is_wide = shown.case["dtype"] == "fp32"
    assert shown.seen("dtypes") == {torch.float32 if is_wide else torch.bfloat16}


def halves(shown: Shown) -> None:
    """Blocks whose halves read the same input."""
    block = shown.case["block"]
    names = shown.run.merged[1]
    layer = next(name.split(".layers.")[0] for name in names if ".layers." in name)
    assert shown.seen("parallel") == {block in ("parallel", "one norm")}
    for norm, is_there in (
        ("pre_mlp_layernorm", block != "one norm"),
        ("post_mlp_layernorm", block == "normed twice"),
    ):
        assert (f"{layer}.layers.0.{norm}.weight" in names) == is_there


def heads(shown: Shown) -> None:
    """A BERT with two losses has the parts of both."""
    weights = shown.run.merged[1]
    case = shown.case
    is_pair = case["style"] == "bert" and case["loss"] != "one head"
    assert ("binary_head.weight" in weights) == is_pair


def vocabulary(shown: Shown) -> None:
    """What the embedding and the output layer have beside their weights; a BERT has the bias in any case."""
    names = shown.run.merged[1]
    kind = shown.case["embeddings"]
    has_bias = kind == "biased" or shown.case["style"] == "bert"
    assert ("embedding.norm.weight" in names) == (kind == "normed")
    assert ("output_layer.bias" in names) == has_bias


def adapters(shown: Shown) -> None:
    """Adapters alone are trained, and saved."""
    names = shown.seen("saved")
    of_adapters = {name for name in names if ".lora_" in name}
    memories = {name for name in names if ".router." in name}
    if shown.case["adapters"] == "none":
        assert not of_adapters
    else:
        assert of_adapters and names == of_adapters | memories
        magnitudes = {name for name in names if ".lora_m." in name}
        assert bool(magnitudes) == shown.case["adapters"].endswith("dora")


AXES = (
    Axis("style", {"gpt2": {}, "llama": {}, "bert": {}}, shows=heads),
    Axis("dtype", {"fp32": {}, "bf16": {}}, shows=dtypes),
    Axis(
        "embeddings",
        {
            "tied": {},
            "untied": {"--untie-embeddings-and-output-weights": ""},
            "normed": {"--embed-layernorm": ""},
            "biased": {"--output-layer-bias": ""},
        },
        shows=vocabulary,
    ),
    Axis(
        "attention",
        {
            "plain": {},
            "normed": NORMED,
            "window": window,
            "capped": CAPPED,
            "bigbird": BIGBIRD,
            "fixed": FIXED,
        },
    ),
    Axis(
        "positions",
        {
            "usual": {},
            "alibi": {"--position-embedding-type": "alibi"},
            "yarn": YARN,
            "scaled": SCALED,
        },
        needs=(
            lambda positions, style: (
                positions == "usual" or (positions == "alibi") == (style != "llama")
            ),
        ),
    ),
    Axis(
        "block",
        {
            "plain": {},
            "parallel": PARALLEL,
            "one norm": ONE_NORM,
            "normed twice": NORMED_TWICE,
        },
        shows=halves,
    ),
    Axis(
        "adapters",
        {
            "none": {},
            "lora": lora(LORA),
            "rows": lora(LORA_ROWS),
            "dropped": dropped,
            "dora": lora(LORA | {"--use-dora": ""}),
            "int8": lora(LORA | {"--lora-base-bits": 8}),
            "nf4 dora": lora(LORA_ROWS | {"--lora-base-bits": 4, "--use-dora": ""}),
        },
        # Muon and LAMB give rounding the size of the weights, which are 0 at first.
        needs=(
            lambda adapters, optimizer: (
                adapters == "none" or optimizer not in ("muon", "lamb")
            ),
            # The blocks of so small weights are cut by ranks, and codes stay where they are.
            lambda adapters, tp: adapters not in ENCODED or tp == 1,
            lambda adapters, knobs: adapters not in ENCODED or knobs != "inner groups",
            lambda adapters, offload, zero: (
                adapters not in ENCODED or offload == "none" or zero < 3
            ),
        ),
        shows=adapters,
    ),
    Axis("kernels", {"auto": {}, "torch": {"--kernels": "torch"}}),
    Axis(
        "dropout",
        {
            0.0: {},
            0.1: {"--hidden-dropout": 0.1, "--attention-dropout": 0.1},
        },
    ),
    Axis(
        "loss",
        {
            "plain": {},
            "smoothed": {"--label-smoothing": 0.2},
            "by token": {"--calculate-per-token-loss": ""},
            "one head": {"--bert-no-binary-head": ""},
        },
        needs=(lambda loss, style: loss != "one head" or style == "bert",),
    ),
)
