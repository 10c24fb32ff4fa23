"""Layers of experts: limits, losses and memories of their routers, dense parts beside them.

The router computes in fp64, so that rounding does not change a choice. In bf16, whose rounding is too large
for that, each token passes all experts, and those drop by position.
"""

from tests.harness.covering import Case
from tests.harness.layout_runs import GLOBAL_BATCH, STEPS

from .axis import Axis, Shown, layers, layout_axis, micro_batches

WIDTH = 48
LIMITS = {
    "dropless": {},
    "probs": {"--moe-expert-capacity-factor": 0.9},
    "position": {
        "--moe-expert-capacity-factor": 0.7,
        "--moe-token-drop-policy": "position",
        "--moe-min-capacity": 2,
    },
    "padded": {
        "--moe-expert-capacity-factor": 0.8,
        "--moe-token-drop-policy": "position",
        "--moe-pad-expert-input-to-capacity": "",
    },
}
KIND, COEFF = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
BALANCES = {
    "aux": {COEFF: 0.02, "--moe-router-linear-bias": ""},
    "seq": {KIND: "seq_aux_loss", COEFF: 0.02, "--moe-z-loss-coeff": "1e-3"},
    "global": {KIND: "global_aux_loss", COEFF: 0.02, "--moe-router-pre-softmax": ""},
    "bias": {
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": "",
        "--moe-router-bias-update-rate": 0.01,
        "--moe-router-topk-scaling-factor": 1.5,
    },
}
TERMS = {
    "aux": {"load balancing loss"},
    "seq": {"seq load balancing loss"},
    "global": {"global load balancing loss"},
}
DENSE = {
    "neither": {},
    "shared": {
        "--moe-shared-expert-intermediate-size": 16,
        "--moe-shared-expert-gate": "",
    },
    "residual": {"--mlp-type": "residual"},
}
# Weights of the dense parts beside experts.
PARTS = {"shared": "shared_experts.gate_weight", "residual": "coefficient"}


def divided_by(case: Case) -> int:
    """The ranks that divide an expert."""
    return case["tp"] if case["etp"] == "none" else 1


def expert_parallel(case: Case) -> int:
    """The ranks that divide the experts of a layer."""
    return case["ep"] * case["tp"] if case["etp"] == "whole" else case["ep"]


def copies(case: Case) -> int:
    """The ranks that hold the same experts."""
    ranks = case["tp"] * case["cp"] * case["dp"]
    return ranks // divided_by(case) // expert_parallel(case)


def numbers_of_experts(case: Case) -> list[int]:
    """The experts of each layer that has some."""
    if case["style"] == "llama" and case["dtype"] == "fp32":
        return [4, 8]
    return [4] * layers(case)


def topk(case: Case) -> int:
    return 2 if case["dtype"] == "fp32" else 4


def of_limit(case: Case) -> dict:
    """Flags of a model with experts. Wide initial weights give choices wide margins."""
    numbers, dense = numbers_of_experts(case), layers(case) - 2
    flags = {
        "--num-experts": " ".join(map(str, dict.fromkeys(numbers))),
        "--moe-router-topk": topk(case),
        "--moe-router-dtype": "fp64",
        "--moe-ffn-hidden-size": WIDTH,
    }
    if len(numbers) == 2:
        flags["--moe-layer-freq"] = f"[0]*{dense}+[1]*2"
    if case["dtype"] == "fp32":
        flags["--init-method-std"] = 0.1
    return flags | LIMITS[case["experts"]]


def rows(shown: Shown) -> None:
    """Each row goes to an expert, each expert is on one rank of a group, and limits drop rows."""
    case, experts = shown.case, shown.experts
    if case["experts"] == "none":
        assert not experts.runs
        return
    numbers = numbers_of_experts(case)
    gated = 2 if case["style"] == "llama" else 1
    assert experts.widths == {WIDTH * gated // divided_by(case)}
    again = 2 if case["recompute"] == "full" else 1
    ranks = case["tp"] * case["cp"] * case["dp"]
    once = micro_batches(case) * ranks
    for name, runs in experts.runs.items():
        is_frozen = case["adapters"] != "none" and ".layers.0." in name
        # Beside adapters of attention, nothing of the first layer's experts is needed in backward.
        assert runs == once * again or (is_frozen and runs == once)
    assert len(experts.runs) == len(numbers)
    assert (experts.dropped > 0) == (case["experts"] != "dropless")
    named = set().union(*shown.run.merged[0].metrics)
    drops = any("dropped" in name for name in named)
    assert drops == (case["experts"] != "dropless")
    if case["curriculum"] == "none":
        assert len(experts.chosen) == len(numbers) * STEPS * GLOBAL_BATCH


def divided(shown: Shown) -> None:
    case = shown.case
    if case["experts"] == "none":
        return
    ep = expert_parallel(case)
    assert shown.experts.local_experts == {n // ep for n in numbers_of_experts(case)}
    sent = sum(
        seen.traffic.bytes[operation, "ep", ep]
        for seen in shown.run.seen
        for operation in ("all_to_all_v", "all_to_all")
    )
    assert (sent > 0) == (ep > 1)


def folded(shown: Shown) -> None:
    """Ranks that hold whole experts gather no rows. Their peers are tensor-parallel ones, or hold the same."""
    if shown.case["etp"] == "none":
        return
    assert not shown.operations("etp")
    if expert_parallel(shown.case) == 1:
        return
    for seen in shown.run.seen:
        assert {"all_to_all_v", "all_to_all"} & {
            operation for operation, axes, _ in seen.traffic.calls if axes == "ep"
        }


def balanced(shown: Shown) -> None:
    """Losses and memories of the routers."""
    case, weights = shown.case, shown.run.merged[1]
    named = set().union(*shown.run.merged[0].metrics)
    terms = {name for name in named if "balancing" in name}
    assert terms == TERMS.get(case["balance"], set())
    assert ("router z-loss" in named) == (case["balance"] == "seq")
    biases = [w for name, w in weights.items() if name.endswith("expert_bias")]
    last = [w for name, w in weights.items() if ".router.last_" in name]
    number = len(numbers_of_experts(case))
    assert len(biases) == number * (case["balance"] == "bias")
    assert len(last) == number * (case["balance"] == "global")
    assert all(w.sum() > 0 for w in last)
    for bias in biases:
        steps = bias / 0.01
        assert bias.abs().sum() > 0
        assert (steps.round() - steps).abs().max() < 1e-4


def dense_parts(shown: Shown) -> None:
    names = [name.partition("mlp.")[2] for name in shown.run.merged[1]]
    found = {part for part in PARTS.values() if part in names}
    wanted = PARTS.get(shown.case["dense"])
    assert found == ({wanted} if wanted else set())


AXES = (
    Axis(
        "experts",
        {"none": {}} | {name: of_limit for name in LIMITS},
        needs=(lambda experts, dtype: (experts, dtype) != ("probs", "bf16"),),
        shows=rows,
    ),
    Axis(
        "balance",
        {"none": {}} | BALANCES,
        needs=(
            lambda balance, experts: (balance == "none") == (experts == "none"),
            lambda balance, dtype: (balance, dtype) != ("bias", "bf16"),
        ),
        shows=balanced,
    ),
    Axis(
        "dense",
        DENSE,
        needs=(lambda dense, experts: dense == "neither" or experts != "none",),
        shows=dense_parts,
    ),
    layout_axis(
        "ep",
        1,
        2,
        4,
        needs=(
            lambda ep, experts: ep == 1 or experts != "none",
            lambda ep, dp, cp: dp * cp % ep == 0,
        ),
        shows=divided,
    ),
    Axis(
        "etp",
        {
            "none": {},
            "whole": lambda case: {"etp": 1, "ep": expert_parallel(case)},
            "copies": {"etp": 1},
        },
        needs=(
            lambda etp, experts: etp == "none" or experts != "none",
            lambda etp, sp: etp == "none" or sp,
            lambda etp, ep: etp != "whole" or ep <= 2,
        ),
        shows=folded,
    ),
)
