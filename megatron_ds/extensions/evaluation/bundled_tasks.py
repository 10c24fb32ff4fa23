"""Three small tasks for lm-evaluation-harness that need no download, one of each way to use a model.

    megatron_ds_opposites    which of four words is the opposite (loglikelihood; 20 items)
    megatron_ds_sentences    perplexity of 20 sentences (loglikelihood_rolling)
    megatron_ds_counting     the next number (generate_until; 20 items)

They show that an evaluation works on a machine without a network; a figure of 20 items ranks no models.
"""

from collections.abc import Callable, Sequence
from typing import Any

OPPOSITES = """hot cold, big small, up down, day night, fast slow, young old, wet dry, hard soft, left right,
open closed, full empty, early late, near far, loud quiet, light dark, rich poor, strong weak, first last,
thick thin, true false""".replace("\n", " ").split(", ")
SENTENCE = "The opposite of {} is {}, and the opposite of {} is {}."
NUMBERS = range(3, 23)  # that are to be found
WORDS = 4  # choices of an item


def opposites() -> dict[str, Any]:
    """Make a multiple choice task, with the right word at another place from item to item."""
    pairs = [pair.split() for pair in OPPOSITES]
    items = []
    for number, (word, opposite) in enumerate(pairs):
        others = [pairs[(number + 3 * i) % len(pairs)][1] for i in range(1, WORDS)]
        gold = number % WORDS
        items.append(
            {
                "word": word,
                "choices": [*others[:gold], opposite, *others[gold:]],
                "gold": gold,
            }
        )
    return _task(
        "megatron_ds_opposites",
        items,
        output_type="multiple_choice",
        doc_to_text="The opposite of {{word}} is",
        doc_to_choice="choices",
        doc_to_target="gold",
        metric_list=_means("acc", "acc_norm"),
    )


def sentences() -> dict[str, Any]:
    """Make a task that measures the perplexity of a word and of a byte."""
    items = []
    for pair in OPPOSITES:
        one, other = pair.split()
        items.append({"text": SENTENCE.format(one, other, other, one)})
    names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return _task(
        "megatron_ds_sentences",
        items,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": name} for name in names],
    )


def counting() -> dict[str, Any]:
    """Make a task of one number after three, which must match exactly."""
    items = [{"text": f"{n - 3}, {n - 2}, {n - 1},", "next": str(n)} for n in NUMBERS]
    return _task(
        "megatron_ds_counting",
        items,
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target=" {{next}}",
        generation_kwargs={"until": [",", "\n"], "max_gen_toks": 8, "do_sample": False},
        metric_list=_means("exact_match"),
    )


BUNDLED: dict[str, Callable[[], dict[str, Any]]] = {
    "megatron_ds_opposites": opposites,
    "megatron_ds_sentences": sentences,
    "megatron_ds_counting": counting,
}


def _task(name: str, items: Sequence[dict], **options: Any) -> dict[str, Any]:
    """Return the configuration of a task whose items are these."""
    return {
        "task": name,
        "custom_dataset": lambda **kwargs: _data(items),
        "test_split": "test",
        "metadata": {"version": 1.0},
        **options,
    }


def _data(items: Sequence[dict]) -> dict[str, Any]:
    from datasets import Dataset  # comes with lm_eval

    return {"test": Dataset.from_list(list(items))}


def _means(*metrics: str) -> list[dict[str, Any]]:
    return [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in metrics
    ]
