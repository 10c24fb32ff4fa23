"""Where state is, and what is computed again or in parts."""

import tempfile

import pytest

from tests.harness.covering import Case

from .axis import Axis, Shown, layers, layout_axis, micro_batches
from .experts import copies
from .models import ENCODED

# Bytes of the state of an element. Muon has one tensor for matrices, and two for everything else.
OPTIMIZER_BYTES = {
    "adam": 8,
    "amsgrad": 12,
    "uncorrected": 8,
    "adagrad": 4,
    "lamb": 8,
}


def bytes_of_state(shown: Shown) -> None:
    """ZeRO divides optimizer, gradients and parameters over the ranks that hold the same ones, in this order:
    experts over those with the same experts, everything else over all data ranks."""
    case = shown.case
    data = case["dp"] * case["cp"]
    wide = case["dtype"] == "fp32"
    kinds = [("master", 1, 0 if wide else 4)]
    if case["optimizer"] in OPTIMIZER_BYTES:
        kinds.append(("optimizer", 1, OPTIMIZER_BYTES[case["optimizer"]]))
    if case["knobs"] == "none" and case["adapters"] not in ENCODED:
        kinds += [("gradient", 2, 4), ("parameter", 3, 4 if wide else 2)]
    for kind, split_from, size in kinds:
        is_split = case["zero"] >= split_from
        parts = (data, copies(case)) if is_split else (1, 1)
        # Frozen weights are parameters alone.
        has = "elements" if kind == "parameter" else "trained"
        expected = sum(
            size * getattr(seen, f"dense_{has}") / parts[0]
            + size * getattr(seen, f"expert_{has}") / parts[1]
            for seen in shown.run.seen
        )
        held = sum(getattr(seen, f"{kind}_bytes") for seen in shown.run.seen)
        # rel: padding to 64
        assert held == pytest.approx(expected, rel=0.25), kind


# What moves time and memory only.
KNOBS = {
    "none": {},
    "late": {"prefetch": 0, "persist": 0, "accumulate": "full", "bucket": 1000},
    "early": {"prefetch": 1000000, "persist": 100000},
    "pinned": {"pin": 1},
    "inner groups": {"hpz": 2},
}


def offload(case: Case) -> dict[str, str]:
    """Keys of the layout: ZeRO 3 offloads parameters too."""
    place = case["offload"]
    keys = {"offload": place}
    if case["zero"] == 3:
        keys["offload_param"] = place
    if place == "nvme":
        keys["nvme"] = tempfile.gettempdir()
    return keys


def places(shown: Shown) -> None:
    away = {shown.case["offload"]} - {"none"}
    assert shown.seen("places") - {"device"} == away


def computed_again(shown: Shown) -> None:
    """How often attention and feed-forward parts ran."""
    case, calls = shown.case, shown.run.calls
    ranks = case["tp"] * case["cp"] * case["dp"]
    once = layers(case) * micro_batches(case) * ranks
    again = case["recompute"]
    assert calls.count("attention") == once * (1 if again == "none" else 2)
    if case["tiles"] == 1 and case["experts"] == "none":
        assert calls.count("mlp") == once * (2 if again == "full" else 1)


def logits_in_parts(shown: Shown) -> None:
    case = shown.case
    ranks = case["tp"] * case["cp"] * case["dp"]
    wanted = micro_batches(case) * ranks if case["logits"] > 1 else 0
    assert shown.run.calls.count("logits in chunks") == wanted


def tiled(shown: Shown) -> None:
    if shown.case["experts"] == "none":
        count = shown.run.calls.count
        assert (count("tile") > count("mlp")) == (shown.case["tiles"] > 1)


def in_cpu(case: Case) -> dict[str, int]:
    """Keys of the layout: where ranks can keep a part each, they move parts."""
    return {"inputs_in_cpu": 1, "parts": int(case["tp"] > 1 and not case["sp"])}


def saved(shown: Shown) -> None:
    """Inputs of blocks that tensor-parallel ranks divide are gathered in each recomputation."""
    case = shown.case
    if "parts=1" in shown.layout:
        traffic = shown.run.seen[0].traffic
        gathered = traffic.calls["all_gather", "tp", case["tp"]]
        assert gathered >= micro_batches(case) * layers(case) // case["pp"]


AXES = (
    layout_axis("zero", 0, 1, 2, 3, shows=bytes_of_state),
    Axis(
        "knobs",
        KNOBS,
        needs=(
            lambda knobs, zero: knobs == "none" or zero == 3,
            lambda knobs, pp: knobs != "pinned" or pp > 1,
            lambda knobs, dp: knobs != "inner groups" or dp == 4,
            lambda knobs, offload: (knobs, offload) != ("inner groups", "nvme"),
        ),
    ),
    Axis(
        "offload",
        {"none": {}, "cpu": offload, "nvme": offload},
        needs=(lambda offload, zero: offload == "none" or zero > 0,),
        shows=places,
    ),
    layout_axis("recompute", "none", "selective", "full", shows=computed_again),
    Axis(
        "saved",
        {
            "whole": {},
            "in cpu": in_cpu,
            "in parts": {"parts": 1},
        },
        needs=(
            lambda saved, recompute: saved == "whole" or recompute == "full",
            lambda saved, tp, sp: saved != "in parts" or tp > 1 and not sp,
        ),
        shows=saved,
    ),
    layout_axis("logits", 1, 5, shows=logits_in_parts),
    layout_axis(
        "tiles",
        1,
        2,
        needs=(lambda tiles, experts: tiles == 1 or experts == "none",),
        shows=tiled,
    ),
)
