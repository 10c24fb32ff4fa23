"""Documents into sentences, as Punkt learns them from the text itself."""

import pickle
import sys

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.corpora.sentences import learn_splitter

pytestmark = pytest.mark.plan

TEXTS = [
    "The abbrv. Smith uses is odd. The abbrv. Jones uses is not. An abbrv. is a word, and an abbrv. has "
    "a stop. Words are words. Words end. Stops stop. A word ends. It stops."
] * 8
HARD = [
    (
        "Dr. Smith met Mr. Jones at 5 p.m. on Monday. They talked.",
        ["Dr. Smith met Mr. Jones at 5 p.m. on Monday.", "They talked."],
    ),
    (
        "See e.g. Fig. 3 and eq. 4. It costs 3.50 dollars! Why? Nobody knows.",
        [
            "See e.g. Fig. 3 and eq. 4.",
            "It costs 3.50 dollars!",
            "Why?",
            "Nobody knows.",
        ],
    ),
    ("The U.S. army came. It left.", ["The U.S. army came.", "It left."]),
    ("One line\nof two.  Next\n\nlast", ["One line\nof two.", "Next\n\nlast"]),
    ("", []),
]


@pytest.fixture(scope="module")
def splitter():
    return learn_splitter(TEXTS)


def test_hard_cases_are_cut_where_a_reader_would(splitter):
    for text, sentences in HARD:
        assert splitter.split(text) == sentences


def test_an_abbreviation_of_the_text_is_learned_and_those_of_english_need_not_be(
    splitter,
):
    assert splitter.split("The abbrv. Smith has is odd.") == [
        "The abbrv. Smith has is odd."
    ]
    untaught = learn_splitter(["Words are words."], "none")
    assert len(untaught.split("The abbrv. Smith has is odd.")) == 2
    assert (
        len(untaught.split("Prof. Smith is odd.")) == 2
        and len(splitter.split("Prof. Smith is odd.")) == 1
    )


def test_kept_newlines_make_the_sentences_the_text_again():
    splitter = learn_splitter(TEXTS, keep_newlines=True)
    for text in (
        *(text for text, _ in HARD),
        "  led by blanks. \n\n And ended by some. \n",
    ):
        assert "".join(splitter.split(text)) == text
    assert splitter.split("One. \n\nTwo.") == ["One. \n\n", "Two."]


def test_a_splitter_survives_the_way_to_a_worker_and_is_known_by_what_it_learned(
    splitter,
):
    splitter.split("Once.")
    again = pickle.loads(pickle.dumps(splitter))
    assert [again.split(text) for text, _ in HARD] == [
        sentences for _, sentences in HARD
    ]
    prints = {
        s.fingerprint
        for s in (
            splitter,
            again,
            learn_splitter(TEXTS),
            learn_splitter(TEXTS, keep_newlines=True),
            learn_splitter(TEXTS, "none"),
        )
    }
    assert len(prints) == 3


def test_without_nltk_or_with_an_unknown_language_the_error_says_what_to_do(
    monkeypatch,
):
    with pytest.raises(ConfigError, match="known for english, none"):
        learn_splitter(TEXTS, "klingon")
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(
        ConfigError,
        match=r'--split-sentences needs the package nltk.*pip install "megatron_ds\[data\]"',
    ):
        learn_splitter(TEXTS)
