"""How samples are made, and which of their tokens a step or a block has."""

from tests.harness.layout_runs import STEPS
from tests.harness.tiny_jobs import DOCUMENTS, SAMPLES

from .axis import Axis, Shown, ranks

# 8 of the 24 tokens, 16, then all of them.
GROWING = {
    "--curriculum-min-length": 8,
    "--curriculum-steps": 3,
    "--curriculum-length-step": 8,
}
# Blocks but the first and the last: from 8 of the 24 tokens to all of them in 3 of the steps.
LTD = {
    "--random-ltd": "",
    "--random-ltd-min-tokens": 8,
    "--random-ltd-steps": 3,
    "--random-ltd-tokens-per-step": 8,
}


def documents(shown: Shown) -> None:
    """Attention keeps documents apart, and their positions begin anew."""
    case = shown.case
    apart = case["documents"] == "apart" or case["samples"] == "packed"
    assert {seen.most_documents > 1 for seen in shown.run.seen} == {apart}
    if case["cp"] == 1 and case["samples"] == "cut" and not case["ltd"]:
        assert {seen.restarts > 0 for seen in shown.run.seen} == {apart}


def made(shown: Shown) -> None:
    count, kind = shown.run.calls.count, shown.case["samples"]
    assert (count("packed") > 0) == (kind == "packed")
    assert (count("fim") > 0) == (kind == "fim")


def read(shown: Shown) -> None:
    """The ranks that read samples: all, or the first of those that read the same."""
    case = shown.case
    sharing = case["tp"] if case["readers"] == "first" else 1
    assert shown.run.calls.count("read") == STEPS * ranks(case) // sharing


def is_gpt(style: str) -> bool:
    return style != "bert"


AXES = (
    Axis(
        "documents",
        {name: {flag: "" for flag in flags} for name, flags in DOCUMENTS.items()},
        needs=(lambda documents, style: documents == "joined" or is_gpt(style),),
        shows=documents,
    ),
    Axis(
        "samples",
        {name: {} for name in SAMPLES},
        needs=(lambda samples, style: samples == "cut" or is_gpt(style),),
        shows=made,
    ),
    Axis(
        "readers",
        {name: {"--data-readers": name} for name in ("all", "first")},
        needs=(lambda readers, tp: readers == "all" or tp > 1,),
        shows=read,
    ),
    Axis(
        "curriculum",
        {"none": {}}
        | {
            kind: GROWING | {"--curriculum-type": f"seqlen_{kind}"}
            for kind in ("truncate", "reshape")
        },
        needs=(lambda curriculum, style: curriculum != "reshape" or is_gpt(style),),
    ),
    Axis(
        "ltd",
        {0: {}, 1: LTD},
        needs=(lambda ltd, style, cp: not ltd or is_gpt(style) or cp == 1,),
    ),
)
