"""From JSON lines with a chosen and a rejected answer to a corpus of pairs, and to rows of it."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_ds.data.text.indexed import IndexedDataset
from megatron_ds.data.text.mask_file import LossMasks
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import DataError
from megatron_ds.extensions.corpora.inspect_dataset import main as inspect
from megatron_ds.extensions.corpora.preference_pair import pair_of
from megatron_ds.extensions.corpora.preprocess_data import main as preprocess
from megatron_ds.extensions.preference.answer_lengths import (
    kept_lengths,
    report_cut_pairs,
)
from megatron_ds.extensions.preference.answer_pairs import PairDataset
from tests.harness.answer_pairs import write_pairs
from tests.harness.chats import CHATML, write_tokenizer

pytestmark = pytest.mark.plan

QUESTION = {"role": "user", "content": "Why?"}
GOOD = {"role": "assistant", "content": "Because it is so."}
BAD = {"role": "assistant", "content": "No."}
FORMATS = (
    {"prompt": "Why?", "chosen": GOOD["content"], "rejected": BAD["content"]},
    {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
)


def flags(folder, *more):
    return [
        *("--preference", "--input", str(folder / "p.jsonl")),
        *("--output-prefix", str(folder / "p")),
        *("--tokenizer-type", "HuggingFaceTokenizer"),
        *("--tokenizer-model", str(folder / "t"), *more),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same pair in three formats, and the corpus of them."""
    folder = tmp_path_factory.mktemp("pairs")
    write_tokenizer(folder / "t", CHATML)
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, FORMATS)))
    assert preprocess(flags(folder)) == 0
    return folder


def test_each_format_is_a_document_with_the_chosen_answer_and_the_rejected_one(folder):
    corpus = IndexedDataset(folder / "p_preference_document")
    masks = LossMasks(corpus)
    words = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder / "t"))
    assert corpus.document_indices.tolist() == [0, 2, 4, 6]
    for number, answer in enumerate((GOOD, BAD) * len(FORMATS)):
        learned = corpus[number][masks.get(number) == 1].tolist()
        assert words.decode(learned) == f"{answer['content']}<|im_end|>"
        assert "Why?" in words.decode(corpus[number].tolist())


def test_inspect_shows_both_answers(folder, capsys):
    words = ["--tokenizer-type", "HuggingFaceTokenizer"]
    model = ["--tokenizer-model", str(folder / "t")]
    prefix = str(folder / "p_preference_document")
    assert inspect([prefix, "--document", "1", "--check", *words, *model]) == 0
    text = capsys.readouterr().out
    assert text.index("⟦Because it is so.<|im_end|>⟧") < text.index("⟦No.<|im_end|>⟧")


@pytest.mark.parametrize(
    "record, why",
    [
        ({"prompt": "Q", "chosen": "A"}, "it has no 'rejected'"),
        ({"prompt": "Q", "chosen": "A", "rejected": "A"}, "are equal"),
        ({"chosen": "QA", "rejected": "QB"}, "are conversations: lists of messages"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "begin with different messages"),
        ({"prompt": "Q", "chosen": "A", "rejected": 3}, "are str, str, int, and not"),
        ({"prompt": "Q", "chosen": [GOOD], "rejected": [BAD]}, "different messages"),
        (
            {"prompt": "Q", **FORMATS[2]},
            "'prompt' is a text that is not among the messages",
        ),
        ({"prompt": [QUESTION], "chosen": "A", "rejected": "B"}, "are list, str, str"),
        (
            {"chosen": [QUESTION, GOOD], "rejected": [QUESTION]},
            "'rejected' has no message",
        ),
    ],
)
def test_what_is_no_pair_is_an_error_with_its_line(
    folder, tmp_path, capsys, record, why
):
    lines = [json.dumps(FORMATS[0]), json.dumps(record)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    words = flags(folder)
    words[words.index(str(folder / "p.jsonl"))] = str(tmp_path / "p.jsonl")
    words[words.index(str(folder / "p"))] = str(tmp_path / "p")
    assert preprocess(words) != 0
    message = capsys.readouterr().err
    assert "line 2" in message and why in message


def test_a_question_beside_whole_conversations_is_that_of_theirs():
    assert pair_of({"prompt": " Why?\n", **FORMATS[2]}) == pair_of(FORMATS[2])


def test_pairs_in_parquet_are_those_of_json_lines(folder, tmp_path):
    table = pyarrow.Table.from_pylist([FORMATS[2]] * 3)
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    (tmp_path / "q.jsonl").write_text("\n".join([json.dumps(FORMATS[2])] * 3))
    for name in ("p.parquet", "q.jsonl"):
        words = flags(folder)
        words[words.index(str(folder / "p.jsonl"))] = str(tmp_path / name)
        words[words.index(str(folder / "p"))] = str(tmp_path / name[0])
        assert preprocess(words) == 0
    for end in ("bin", "idx", "mask.bin"):
        files = [tmp_path / f"{name}_preference_document.{end}" for name in "pq"]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_chats_and_pairs_are_records_of_different_formats(folder, capsys):
    assert preprocess(flags(folder, "--chat")) != 0
    assert "--chat and --preference" in capsys.readouterr().err


# ------------------------------------------------------------------ rows
@pytest.mark.parametrize(
    "lengths, kept",
    [
        ((5, 5), (5, 5)),
        ((9, 9), (5, 5)),
        ((2, 20), (2, 8)),
        ((20, 3), (7, 3)),
        ((6, 4), (6, 4)),
    ],
)
def test_a_short_answer_leaves_its_room_to_the_other(lengths, kept):
    assert kept_lengths(np.array([lengths]), 10).tolist() == [list(kept)]


def test_rows_have_both_answers_of_a_pair_in_an_order_of_each_epoch(tmp_path):
    masks = write_pairs(tmp_path / "p", 7, 50, 12)
    dataset = PairDataset(masks, range(2, 7), 30, 15, 1)
    dataset.reference = np.arange(10, dtype=np.float32).reshape(5, 2)
    epochs = [[dataset[5 * e + i]["reference"][0] for i in range(5)] for e in range(3)]
    assert all(sorted(epoch) == [0, 2, 4, 6, 8] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    row = dataset.pair(1)
    for answer in (0, 1):
        number = 2 * 3 + answer
        here = row["document_ids"] == answer
        assert row["tokens"][here].tolist() == masks.corpus[number].tolist()
        assert row["loss_mask"][here].tolist() == masks.get(number).tolist()
    padding = row["document_ids"] == 2
    assert (row["tokens"][padding] == -1).all() and not row["loss_mask"][padding].any()


def test_pairs_that_are_cut_are_reported(tmp_path, caplog):
    masks = write_pairs(tmp_path / "p", 7, 50, 40)
    lengths = masks.corpus.lengths.reshape(-1, 2)
    cut = int((lengths.sum(1) > 41).sum())
    report_cut_pairs(masks, range(7), kept_lengths(lengths, 41))
    assert f"{cut} of 7 pairs do not fit" in caplog.text and 0 < cut < 7
    with pytest.raises(DataError, match="Use a larger --seq-length"):
        report_cut_pairs(masks, range(7), kept_lengths(lengths, 2))
