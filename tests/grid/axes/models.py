"""What a model computes."""

from collections.abc import Callable

import torch

from tests.harness.covering import Case

from .axis import Axis, Shown
from .optimizers import STEADY

NORMED = {
    "--qk-layernorm": "",
    "--add-qkv-bias": "",
    "--softmax-type": "off-by-one",
}
WINDOWED = {
    "--window-attn-skip-freq": 2,
    "--softmax-type": "learnable",
}
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

# Adapters of whole layers, and of some of their rows.
LORA = {"--lora-rank": 3, "--lora-alpha": 6}
LORA_DROPPED = LORA | {
    "--lora-target-modules": "k_proj,linear_proj",
    "--lora-dropout": 0.2,
}
LORA_ROWS = LORA | {"--lora-target-modules": "q_proj,v_proj,o_proj,down_proj"}

ENCODED = ("int8", "nf4 dora")


def lora(options: dict) -> Callable[[Case], dict]:
    """Half of the matrices begin at 0: an element whose gradient is rounding alone must not move as far as others."""
    return lambda case: options if case["optimizer"] == "adagrad" else options | STEADY


def window(case: Case) -> dict:
    """A BERT sees tokens on both sides."""
    return WINDOWED | {"--window-size": "5,3" if case["style"] == "bert" else "5,0"}


def dtypes(shown: Shown) -> None:
    is_wide = shown.case["dtype"] == "fp32"
    assert shown.seen("dtypes") == {torch.float32 if is_wide else torch.bfloat16}


def halves(shown: Shown) -> None:
    """Blocks whose halves read the same input."""
    assert shown.seen("parallel") == {shown.case["block"] == "parallel"}


def heads(shown: Shown) -> None:
    """A BERT with two losses has the parts of both."""
    weights = shown.run.merged[1]
    case = shown.case
    is_pair = case["style"] == "bert" and case["loss"] != "one head"
    assert ("binary_head.weight" in weights) == is_pair


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
        {"tied": {}, "untied": {"--untie-embeddings-and-output-weights": ""}},
    ),
    Axis(
        "attention",
        {
            "plain": {},
            "normed": NORMED,
            "window": window,
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
    Axis("block", {"plain": {}, "parallel": PARALLEL}, shows=halves),
    Axis(
        "adapters",
        {
            "none": {},
            "lora": lora(LORA),
            "rows": lora(LORA_ROWS),
            "dropped": lora(LORA_DROPPED),
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
