"""Where state is, and what is computed again or in parts."""

import tempfile

import pytest

from tests.harness.covering import Case

from .axis import Axis, Shown, layers, layout_axis, micro_batches


def bytes_of_state(shown: Shown) -> None:
    """ZeRO divides optimizer, gradients and parameters over the data-parallel ranks, in this order."""
    case = shown.case
    is_plain = case["experts"] == "none" and case["knobs"] == "none"
    if not is_plain or case["optimizer"] not in ("adam", "uncorrected"):
        return
    copies_of_all = case["dp"] * case["cp"]
    elements = sum(s.parameter_elements for s in shown.run.seen) / copies_of_all
    wide = case["dtype"] == "fp32"
    for kind, split_from, size in (
        ("parameter", 3, 4 if wide else 2),
        ("gradient", 2, 4),
        ("optimizer", 1, 8),
        ("master", 1, 0 if wide else 4),
    ):
        copies = 1 if case["zero"] >= split_from else copies_of_all
        held = sum(getattr(s, f"{kind}_bytes") for s in shown.run.seen)
        # rel: padding to 64
        assert held == pytest.approx(copies * elements * size, rel=0.25), kind


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
    once = layers(case) * micro_batches(case) * case["tp"] * case["dp"]
    again = case["recompute"]
    if case["cp"] == 1:
        assert calls.count("attention") == once * (1 if again == "none" else 2)
    if case["tiles"] == 1 and case["experts"] == "none":
        of_all = once * case["cp"]
        assert calls.count("mlp") == of_all * (2 if again == "full" else 1)


def logits_in_parts(shown: Shown) -> None:
    case = shown.case
    ranks = case["tp"] * case["cp"] * case["dp"]
    wanted = micro_batches(case) * ranks if case["logits"] > 1 else 0
    assert shown.run.calls.count("logits in chunks") == wanted


def tiled(shown: Shown) -> None:
    if shown.case["experts"] == "none":
        count = shown.run.calls.count
        assert (count("tile") > count("mlp")) == (shown.case["tiles"] > 1)


def saved(shown: Shown) -> None:
    """Inputs of blocks that tensor-parallel ranks divide are gathered in each recomputation."""
    case = shown.case
    if case["saved"] == "in parts":
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
        {"whole": {}, "in cpu": {"inputs_in_cpu": 1}, "in parts": {"parts": 1}},
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
