"""Continuations by a generator are those by scores alone, which need no cache of keys."""

import pytest

from megatron_ds.extensions.evaluation.greedy_text import Prompt, continue_greedily
from megatron_ds.extensions.evaluation.leading_rank import lead
from megatron_ds.extensions.evaluation.scorer import Scorer
from tests.evaluation.test_evaluation_harness import POSITIONS, at_layout

pytestmark = pytest.mark.threads

PROMPTS = [
    Prompt((1, 2, 3), ("\n", "e"), 12),
    Prompt(tuple(range(60)), (), 9),
    Prompt((256,), ("zzz",), 5),
]


class ScoresAlone:
    generates = False

    def __init__(self, score):
        self.score = score

    def __call__(self, requests):
        return self.score(requests)


@pytest.mark.parametrize("layout", ["dp=1", "tp=2,pp=2", "cp=2"])
def test_texts_of_a_generator_are_those_of_scores(layout):
    def both(model):
        def ask(score):
            made = [
                continue_greedily(asked, model.tokenizer, PROMPTS, POSITIONS)
                for asked in (score, ScoresAlone(score))
            ]
            return made, score.generates

        return lead(Scorer(model.replica), ask)

    for (texts, by_scores), generates in at_layout("llama", layout, both):
        assert texts == by_scores and any(texts)
        assert generates == ("cp" not in layout)
