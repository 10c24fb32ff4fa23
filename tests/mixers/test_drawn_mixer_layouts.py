"""Models with mixers train under drawn layouts as in one process."""

import random

import pytest

from tests.harness.drawn_layouts import drawn_layout, is_legal
from tests.harness.layout_runs import stray
from tests.harness.tiny_jobs import TOLERANCE
from tests.mixers.test_mixer_layouts import job_of

pytestmark = pytest.mark.threads

STEPS = 3
LAYOUTS = 40
MODELS = {
    "delta nets": "blocks",
    "Mamba-2": "mamba blocks",
    "beside attention": "side by side",
    "halves": "halves",
}
APART = "--reset-position-ids --reset-attention-mask"


def drawn(draw: random.Random) -> tuple[str, str, str]:
    """(model, more flags, layout)"""
    model = draw.choice([*MODELS])
    layout = drawn_layout(draw, has_experts=model == "halves")
    return model, draw.choice(("", APART)), layout


def chosen() -> list[tuple[str, str, str]]:
    draw = random.Random(7)
    found: dict[tuple[str, str, str], None] = {}
    while len(found) < LAYOUTS:
        case = drawn(draw)
        if is_legal(job(*case[:2]), case[2]):
            found[case] = None
    return [*found]


def job(model: str, more: str) -> list[str]:
    return job_of(MODELS[model], more)


CASES = [
    pytest.param(*case, marks=[pytest.mark.rest] * (number >= 2))
    for number, case in enumerate(chosen())
]


@pytest.mark.parametrize("model, more, layout", CASES)
def test_a_drawn_layout_trains_like_one_process(model, more, layout):
    difference, _ = stray(job(model, more), layout, STEPS)
    assert difference.is_within(TOLERANCE["fp32"]), difference
