"""Ranks that divide matrices, sequences and batches."""

from tests.harness.covering import Rule
from tests.harness.tiny_jobs import SEQ_LENGTH

from .axis import Axis, Shown, layout_axis, micro_batches

HIDDEN, HEADS = 32, 4
# How ranks that share sequences exchange keys, and the operations that show it.
COMM = {
    "none": ({}, set()),
    "p2p": ({"comm_type": "p2p"}, {"send"}),
    "all_gather": ({"comm_type": "all_gather"}, {"all_gather", "reduce_scatter"}),
    "a2a": ({"comm_type": "a2a"}, {"all_to_all"}),
    "levels": ({"comm_type": "a2a+p2p", "hcp": "2 2"}, {"send", "all_to_all"}),
}


def rows_of_queries(shown: Shown) -> None:
    """The rows of the projections that a tensor-parallel rank holds."""
    case = shown.case
    groups = 2 if case["style"] == "llama" else HEADS
    channels = 12 if case["positions"] == "yarn" else HIDDEN // HEADS
    rows = (HEADS + 2 * groups) * channels
    assert shown.seen("qkv_rows") == {rows // case["tp"]}


def tokens_of_blocks(shown: Shown) -> None:
    """The shapes of what blocks are given: a rank's share of the tokens."""
    case = shown.case
    split = case["cp"] * (case["tp"] if case["sp"] else 1)
    lengths = {SEQ_LENGTH} if case["curriculum"] == "none" else {8, 16, SEQ_LENGTH}
    folds = case["curriculum"] == "reshape"
    whole = {
        (n // split, case["mbs"] * (SEQ_LENGTH // n if folds else 1), HIDDEN)
        for n in lengths
    }
    inputs = shown.seen("block_inputs")
    if not case["ltd"]:
        assert inputs == whole
    elif case["curriculum"] == "none" and case["cp"] == 1:
        kept = {(n // split, case["mbs"], HIDDEN) for n in range(8, SEQ_LENGTH, 8)}
        assert inputs == whole | kept
    else:
        assert inputs >= whole


def exchanges(shown: Shown) -> None:
    """Attention communicates between the ranks that share sequences, in the way that was asked for."""
    _, wanted = COMM[shown.case["comm"]]
    found = shown.operations("cp")
    assert wanted <= found
    assert ("send" in found) == ("send" in wanted)


def forwards(shown: Shown) -> None:
    """A data-parallel rank has its share of the micro-batches."""
    case = shown.case
    assert {len(seen.stages) * micro_batches(case) for seen in shown.run.seen} == {
        seen.forwards for seen in shown.run.seen
    }


def at_most(number: int) -> Rule:
    """A rule about the number of ranks."""
    return lambda tp, cp, pp, dp: tp * cp * pp * dp <= number


AXES = (
    layout_axis("tp", 1, 2, shows=rows_of_queries),
    layout_axis(
        "sp", 0, 1, needs=(lambda sp, tp: not sp or tp > 1,), shows=tokens_of_blocks
    ),
    layout_axis("cp", 1, 2, 4),
    Axis(
        "comm",
        {name: options for name, (options, _) in COMM.items()},
        needs=(
            lambda comm, cp: (comm == "none") == (cp == 1),
            lambda comm, cp: comm != "levels" or cp == 4,
            lambda comm, cp, tp: comm != "a2a" or HEADS // tp % cp == 0,
        ),
        shows=exchanges,
    ),
    layout_axis("dp", 1, 2, 4, shows=forwards),
    layout_axis("mbs", 2, 1, needs=(lambda mbs, dp: mbs * dp <= 4,)),
)
