"""Fill in the middle: every text can be put together again, and the draws belong to the sample."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.kind import PAD
from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.gpt_data import GPTCollator
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.fim.fill_in_middle import FillInMiddle, FIMDataset, make_fim

pytestmark = pytest.mark.plan

PRE, MID, SUF, EOD, FILE = 300, 301, 302, 303, 304
MARKS = {"<fim_prefix>": PRE, "<fim_middle>": MID, "<fim_suffix>": SUF, "<file>": FILE}
TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "Größenwahn – ein Wort",
    "x",
    "# no\nprint(1)\n",
    "aabbccddeeffgghhiijjkk" * 3,
]


class Pairs:
    """Bytes, but two letters that are alike are one token: to cut between them changes how many tokens there
    are."""

    vocab_size, eod = 305, EOD

    def encode(self, text):
        if text in MARKS:
            return [MARKS[text]]
        ids = []
        for byte in text.encode():
            if ids and ids[-1] == byte and chr(byte).islower() and byte - ord("a") < 20:
                ids[-1] = 256 + byte - ord("a")
            else:
                ids.append(byte)
        return ids

    def decode(self, ids):
        return b"".join(
            bytes([i]) if i < 256 else bytes([i - 256 + ord("a")] * 2) for i in ids
        ).decode(errors="replace")


FIM = FillInMiddle(Pairs(), PRE, MID, SUF, rate=1.0)


def sample_of(*texts, size=None, end=True):
    ids = [i for text in texts for i in (*Pairs().encode(text), EOD)][
        : None if end else -1
    ]
    return np.array([*ids, *[PAD] * ((size or len(ids)) - len(ids))], np.int64)


def pieces(tokens, at=EOD):
    """Lists between the tokens `at`."""
    found = [[]]
    for token in tokens.tolist() if isinstance(tokens, np.ndarray) else tokens:
        found.append([]) if token == at else found[-1].append(token)
    return found


def restored(ids):
    """(text, order) of a document, by the definition of the two orders."""
    if PRE not in ids:
        return Pairs().decode(ids), "plain"
    assert ids[0] == PRE and ids.count(SUF) == ids.count(MID) == 1
    suffix, middle = ids.index(SUF), ids.index(MID)
    text = Pairs().decode
    if suffix == 1:
        return text(ids[middle + 1 :]) + text(
            ids[2:middle]
        ), "spm"  # prefix and middle, then the suffix
    return text(ids[1:suffix]) + text(ids[middle + 1 :]) + text(
        ids[suffix + 1 : middle]
    ), "psm"


@pytest.mark.parametrize("seed", range(20))
def test_every_text_can_be_put_together_again(seed):
    row = FIM(sample_of(*TEXTS, size=400), np.random.default_rng(seed))
    assert len(row) == 400
    documents = pieces(row[row != PAD])[:-1]
    assert [restored(ids)[0] for ids in documents] == TEXTS
    assert all(order != "plain" for order in (restored(ids)[1] for ids in documents))


def test_rates_are_met():
    counts = dict.fromkeys(("plain", "psm", "spm"), 0)
    fim = replace(FIM, rate=0.4, spm_rate=0.25)
    for i in range(500):
        row = fim(sample_of(*TEXTS[:2], size=200), np.random.default_rng(i))
        for ids in pieces(row[row != PAD])[:-1]:
            counts[restored(ids)[1]] += 1
    # four sigma
    assert counts["plain"] == pytest.approx(600, abs=60) and counts[
        "spm"
    ] == pytest.approx(100, abs=35)
    assert counts["psm"] == 1000 - counts["plain"] - counts["spm"]


def test_rates_of_zero_and_one_are_allowed():
    for rate, most in (
        (0.0, 2),
        (1.0, 10),
    ):  # an empty prefix looks like the other order
        rows = [
            replace(FIM, spm_rate=rate)(sample_of(TEXTS[0]), np.random.default_rng(i))
            for i in range(10)
        ]
        assert most - 2 <= sum(row[1] == SUF for row in rows) <= most
    untouched = sample_of(*TEXTS)
    assert np.array_equal(
        replace(FIM, rate=0.0)(untouched, np.random.default_rng(0)), untouched
    )


def test_both_cuts_fall_anywhere_in_the_text():
    text, places = "abcdefgh", set()
    for i in range(300):
        row = replace(FIM, spm_rate=0.0)(
            sample_of(text, size=12), np.random.default_rng(i)
        ).tolist()
        places.add(
            (
                row.index(SUF) - 1,
                row.index(SUF) - 1 + row.index(EOD) - row.index(MID) - 1,
            )
        )
    assert {a for a, _ in places} == {b for _, b in places} == set(range(9)) and all(
        a <= b for a, b in places
    )


def test_what_does_not_fit_is_left_out_and_what_is_missing_is_padding():
    full = sample_of(*TEXTS)
    row = FIM(full, np.random.default_rng(1))
    assert len(row) == len(full) and row[0] == PRE
    # 'aaa' + 'a' are as long as 'aa' + 'aa', not shorter
    alike = FIM(sample_of("aa" * 40), np.random.default_rng(3))
    assert len(alike) == len(sample_of("aa" * 40))
    batch = GPTCollator(9, 305)(
        [{"tokens": FIM(sample_of("ab", size=10), np.random.default_rng(1))}],
        [0],
        (0,),
        True,
    )
    # two letters, three marks, the end; less the first
    assert batch.loss_mask.sum() == 2 + 3 and (batch.tokens >= 0).all()


def test_fragments_are_rearranged_each_by_itself():
    row = np.array(
        [*Pairs().encode("one"), FILE, *Pairs().encode("two"), FILE, EOD, *[PAD] * 30]
    )
    seen = set()
    for i in range(60):
        got = replace(FIM, rate=0.7, split=FILE, fragment_rate=0.5)(
            row, np.random.default_rng(i)
        )
        document, rest = pieces(got[got != PAD])
        fragments = [restored(ids) for ids in pieces(document, FILE)]
        assert [text for text, _ in fragments] == ["one", "two", ""] and not rest
        seen.add(tuple(order == "plain" for _, order in fragments[:2]))
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


def test_texts_with_a_prefix_and_halves_of_characters_stay_as_they_are():
    row = replace(FIM, no_prefix="# no")(
        sample_of(*TEXTS[3:], size=200), np.random.default_rng(0)
    )
    first, second, _ = pieces(row[row != PAD])
    assert restored(first)[1] == "plain" and restored(second)[1] != "plain"
    cut = np.array([*"ö".encode()[1:], *b"lig", EOD, *b"xy", *"ö".encode()[:1]])
    assert np.array_equal(FIM(cut, np.random.default_rng(0)), cut)


class Texts:
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return {"tokens": sample_of(TEXTS[i % 5], TEXTS[(i + 1) % 5], size=150)}


def test_a_sample_is_the_same_whoever_asks_for_it_and_when():
    """Upstream draws from one stream per dataset, so that workers and resumed runs see other samples."""
    dataset = FIMDataset(Texts(), FIM, seed=5)
    in_order = [dataset[i]["tokens"] for i in range(12)]
    fresh = FIMDataset(Texts(), FIM, seed=5)
    assert all(
        np.array_equal(fresh[i]["tokens"], in_order[i]) for i in reversed(range(12))
    )
    assert not np.array_equal(in_order[0], in_order[5]), (
        "samples of the same text are drawn apart"
    )
    other = FIMDataset(Texts(), FIM, seed=6)
    assert any(not np.array_equal(other[i]["tokens"], in_order[i]) for i in range(12))
    loader = Loader(dataset, GPTCollator(149, 305), micro_batch_size=1, num_workers=3)
    parts = [loader.batch(at, 4, rank, 2) for at in (0, 4, 8) for rank in (0, 1)]
    loader.close()
    for part in parts:
        for place, row in zip(part.sample_ids, part.tokens.tolist()):
            assert row == np.maximum(in_order[place], 0)[:-1].tolist()


def test_marks_are_tokens_by_text_or_number():
    fim = make_fim(
        DataConfig(
            fim_data=True,
            fim_rate=0.9,
            fim_middle_token="301",
            fim_split_sample="<file>",
        ),
        Pairs(),
    )
    assert (
        fim.prefix,
        fim.middle,
        fim.suffix,
        fim.split,
        fim.rate,
        fim.fragment_rate,
    ) == (PRE, MID, SUF, FILE, 0.9, 0.9)
    for wrong in ("<no_such>", "305"):
        with pytest.raises(ConfigError, match="--fim-suffix-token"):
            make_fim(DataConfig(fim_data=True, fim_suffix_token=wrong), Pairs())
