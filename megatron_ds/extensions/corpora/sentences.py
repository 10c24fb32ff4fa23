"""Splitting documents into sentences, for BERT. Punkt learns from the text which full stops end a sentence.

Kiss and Strunk 2006, "Unsupervised multilingual sentence boundary detection" (Computational Linguistics 32,
4): an abbreviation is a word that is followed by a full stop more often than chance would have it. Common
English abbreviations are given, since a short text does not teach them. The implementation is nltk's, of the
extra `data`.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from ...errors import ConfigError
from ...host.packages import import_extra

# Without the last full stop, in lower case, as Punkt stores them.
ABBREVIATIONS = {
    "english": (
        "mr mrs ms dr prof rev hon gen col capt lt sgt gov sen rep pres st jr sr messrs nos vs etc "
        "e.g i.e cf al viz approx ca fig figs eq eqs secs chap vol vols pp ed eds op cit dept univ "
        "inc ltd co corp bros jan feb apr jun jul aug sep sept oct nov dec tue tues thu thurs fri "
        "a.m p.m u.s u.k u.n d.c ph.d m.d b.a m.a b.c a.d"
    ).split(),
    "none": (),
}
TRAINING_BYTES = 1 << 23  # of text from the start of the input: takes two seconds


class Splitter:
    """Splits a text into sentences. Can be pickled, so that all workers and shards split alike.

    keep_newlines: the white space between two sentences stays with the first; the joined sentences are then
    the text.
    """

    def __init__(self, state: dict, keep_newlines: bool = False):
        self._state = state
        self._keep_newlines = keep_newlines
        description = json.dumps([state, keep_newlines], sort_keys=True)
        self.fingerprint = hashlib.sha256(description.encode()).hexdigest()[:16]

    def split(self, text: str) -> list[str]:
        """Return the sentences of a text."""
        if not self._keep_newlines:
            return self._punkt.tokenize(text)
        starts = [start for start, _ in self._punkt.span_tokenize(text)]
        starts = [0, *starts[1:]] if starts else []
        return [
            text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)])
        ]

    @cached_property
    def _punkt(self):
        nltk = _nltk()
        parameters = nltk.PunktParameters()
        parameters.abbrev_types = set(self._state["abbreviations"])
        parameters.collocations = {tuple(pair) for pair in self._state["collocations"]}
        parameters.sent_starters = set(self._state["starters"])
        parameters.ortho_context = defaultdict(int, self._state["contexts"])
        return nltk.PunktSentenceTokenizer(parameters)

    def __getstate__(self) -> dict:
        return {
            name: value for name, value in self.__dict__.items() if name != "_punkt"
        }


def learn_splitter(
    texts: Iterable[str], language: str = "english", keep_newlines: bool = False
) -> Splitter:
    """Return a splitter trained on the first TRAINING_BYTES.  language: its common abbreviations are added."""
    if language not in ABBREVIATIONS:
        raise ConfigError(
            f"--lang {language}: abbreviations are known for {', '.join(ABBREVIATIONS)}. Use "
            "none: abbreviations are also learned from the text."
        )
    # Learn from as much text as the limit allows.
    nltk = _nltk()
    left = TRAINING_BYTES
    trainer = nltk.PunktTrainer()
    for text in texts:
        if left <= 0:
            break
        trainer.train(text[:left], finalize=False)
        left -= len(text)
    trainer.finalize_training()
    # Sorted, so that equal texts make equal splitters.
    learned = trainer.get_params()
    return Splitter(
        {
            "abbreviations": sorted(
                learned.abbrev_types | set(ABBREVIATIONS[language])
            ),
            "collocations": sorted(learned.collocations),
            "starters": sorted(learned.sent_starters),
            "contexts": dict(sorted(learned.ortho_context.items())),
        },
        keep_newlines,
    )


def _nltk():
    import_extra("--split-sentences", "nltk", "data")
    from nltk.tokenize import punkt

    return punkt
