"""From JSON lines of conversations to a corpus with masks: made, cut into shards, merged, inspected, read."""

import json
import random
import resource

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_ds.config import parse
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.gpt_data import GPT_DATA
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from megatron_ds.data.text.mask_file import LossMasks, MaskWriter, mask_path
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import DataError
from megatron_ds.extensions.corpora.inspect_dataset import main as inspect
from megatron_ds.extensions.corpora.merge_datasets import main as merge
from megatron_ds.extensions.corpora.preprocess_data import main as preprocess
from tests.harness.chats import CHATML, MISMARKED, random_record, write_tokenizer
from tests.harness.limits import files_of_at_most

pytestmark = pytest.mark.plan

COUNT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations, their tokenizer, and the corpus of them, `one_chat_document`."""
    folder = tmp_path_factory.mktemp("chats")
    write_tokenizer(folder / "t", CHATML)
    lines = [
        json.dumps(random_record(random.Random(seed), frozenset({"system", "turns"})))
        for seed in range(COUNT)
    ]
    (folder / "c.jsonl").write_text("\n".join(lines))
    assert preprocess(flags(folder, "one")) == 0
    return folder


def flags(folder, name, *more):
    return [
        *("--chat", "--input", str(folder / "c.jsonl")),
        *("--output-prefix", str(folder / name)),
        *("--tokenizer-type", "HuggingFaceTokenizer"),
        *("--tokenizer-model", str(folder / "t"), *more),
    ]


def bytes_of(prefix):
    return [
        (prefix.parent / f"{prefix.name}.{end}").read_bytes()
        for end in ("bin", "idx", "mask.bin")
    ]


def test_the_corpus_has_a_mask_for_each_token_and_the_learned_ones_are_the_answers(
    folder,
):
    corpus = IndexedDataset(folder / "one_chat_document")
    masks = LossMasks(corpus)
    words = words_of(parse_run(folder))
    for number, line in enumerate((folder / "c.jsonl").read_text().splitlines()):
        ids = corpus[number][masks.get(number) == 1]
        answers = [
            f"{message['content']}<|im_end|>"
            for message in json.loads(line)["messages"]
            if message["role"] == "assistant"
        ]
        assert words.decode(ids.tolist()) == "".join(answers)
    assert len(corpus) == COUNT and masks.count() < corpus.num_tokens


def test_shards_merged_are_the_bytes_of_one_run_and_a_shard_without_masks_is_made_again(
    folder,
):
    names = [folder / f"s_0000{i}_of_00002_chat_document" for i in range(2)]
    shards = ["--num-shards", "2", "--shard-index"]
    for index in ("0", "1"):
        assert preprocess(flags(folder, "s", *shards, index)) == 0
    made = mask_path(names[1]).stat().st_mtime_ns
    mask_path(names[0]).unlink()
    for index in ("0", "1"):
        assert preprocess(flags(folder, "s", *shards, index)) == 0
    assert mask_path(names[1]).stat().st_mtime_ns == made
    output = folder / "merged"
    inputs = [str(name) for name in names]
    assert merge(["--input", *inputs, "--output-prefix", str(output)]) == 0
    assert bytes_of(output) == bytes_of(folder / "one_chat_document")
    assert inspect([str(output), "--check"]) == 0
    # Conversations and texts do not mix, and a mask that was lost is not forgotten.
    for name in names:
        mask_path(name).unlink()
        assert merge(["--input", *inputs, "--output-prefix", str(folder / "no")]) != 0
        assert inspect([str(name), "--check"]) != 0
    # Texts that replace conversations have no mask beside them.
    for name in names:
        name.with_suffix(".json").unlink()
    assert merge(["--input", *inputs, "--output-prefix", str(output)]) == 0
    assert not mask_path(output).exists()


@pytest.mark.rest  # two processes start anew
def test_the_output_does_not_depend_on_the_workers(folder):
    assert preprocess(flags(folder, "two", "--workers", "2")) == 0
    assert bytes_of(folder / "two_chat_document") == bytes_of(
        folder / "one_chat_document"
    )


def test_inspect_shows_what_is_learned_and_finds_damage(folder, capsys):
    prefix = folder / "one_chat_document"
    words = ["--tokenizer-type", "HuggingFaceTokenizer"]
    model = ["--tokenizer-model", str(folder / "t")]
    shown = [str(prefix), "--document", "3", "--tokens", "9999", *words, *model]
    assert inspect(shown) == 0
    text = capsys.readouterr().out
    record = json.loads((folder / "c.jsonl").read_text().splitlines()[3])
    for message in record["messages"]:
        is_learned = message["role"] == "assistant"
        assert (f"⟦{message['content']}<|im_end|>⟧" in text) == is_learned
    # A byte that is no mask, then a mask that differs from the checksum.
    path = mask_path(prefix)
    whole = path.read_bytes()
    for damage, why in ((b"\7", "byte 0 is 7"), (b"\1", "its SHA-256 is not")):
        path.write_bytes(damage + whole[1:])
        assert inspect([str(prefix), "--check"]) != 0
        assert why in capsys.readouterr().err
    path.write_bytes(whole)


def test_masks_of_another_corpus_are_an_error_when_it_is_opened(folder):
    prefix = folder / "one_chat_document"
    path = mask_path(prefix)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"has {len(whole) - 1} masks, and .* tokens"):
        datasets_of(parse_run(folder))
    path.unlink()
    with pytest.raises(DataError, match="mask.bin does not exist"):
        datasets_of(parse_run(folder))
    path.write_bytes(whole)


def test_a_bad_conversation_is_an_error_with_its_line_or_is_left_out(folder, capsys):
    lines = (folder / "c.jsonl").read_text().splitlines()
    bad = '{"messages": [{"role": "user", "content": "Q"}]}'
    (folder / "bad.jsonl").write_text("\n".join([*lines, bad]))
    words = flags(folder, "bad")
    words[words.index(str(folder / "c.jsonl"))] = str(folder / "bad.jsonl")
    assert preprocess(words) != 0
    assert f"bad.jsonl, line {COUNT + 1}: no answer to learn" in capsys.readouterr().err
    assert not list(folder.glob("bad_chat*"))
    assert preprocess([*words, "--skip-bad-lines"]) == 0
    assert bytes_of(folder / "bad_chat_document") == bytes_of(
        folder / "one_chat_document"
    )


@pytest.mark.rest
def test_rows_of_parquet_are_the_conversations_of_json_lines(folder):
    records = [json.loads(line) for line in (folder / "c.jsonl").open()]
    # A column that is empty in some rows, and one about something else.
    table = pyarrow.Table.from_pylist(
        [record | {"tools": None, "id": 1} for record in records]
    )
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=7)
    words = flags(folder, "rows")
    words[words.index(str(folder / "c.jsonl"))] = str(folder / "c.parquet")
    assert preprocess([*words, "--workers", "2"]) == 0
    expected = bytes_of(folder / "one_chat_document")
    assert bytes_of(folder / "rows_chat_document") == expected
    # In shards, too.
    for index in ("0", "1"):
        assert preprocess([*words, "--num-shards", "2", "--shard-index", index]) == 0
    shards = [f"rows_0000{i}_of_00002_chat_document" for i in range(2)]
    parts = [len(IndexedDataset(folder / name)) for name in shards]
    assert sum(parts) == COUNT and all(parts)


def test_answers_that_are_probably_not_as_meant_are_reported(folder, capsys, caplog):
    """The prompt has another header than the answers."""
    other = CHATML.replace("<|im_start|>assistant\n", "<|assistant|>")
    (folder / "other.jinja").write_text(other)
    more = ["--chat-template", str(folder / "other.jinja"), "--workers", "2"]
    assert preprocess(flags(folder, "doubtful", *more)) == 0
    assert f"in {COUNT} conversations an answer does not continue" in caplog.text
    assert "The sample: " in caplog.text


@pytest.mark.parametrize(
    "more, why",
    [
        (["--split-sentences"], "--chat reads whole records"),
        (["--chat-template-kwargs", "[1]"], "is not a JSON object"),
        (["--chat-template", "absent.jinja"], "absent.jinja cannot be read"),
    ],
)
def test_flags_that_do_not_go_with_conversations_are_refused(folder, capsys, more, why):
    assert preprocess(flags(folder, "x", *more)) != 0
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.0, 0.5, 1.5, 1.99])
def test_nothing_is_left_where_the_disk_is_full(folder, capsys, share):
    """The masks have a byte for each token, and the tokens two: the disk is full in the one or the other."""
    masks = (folder / "one_chat_document.mask.bin").stat().st_size
    before = sorted(path.name for path in folder.iterdir())
    with files_of_at_most(int(share * masks)):
        assert preprocess(flags(folder, "full")) == 2
    assert "error: cannot write" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_error_inside_is_not_hidden_by_that_of_closing_the_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writers = [MaskWriter(tmp_path / "a"), IndexedWriter(tmp_path / "a", np.uint16)]
    try:
        for writer in writers:
            with pytest.raises(ZeroDivisionError), writer:
                # what stays in the buffer cannot be written
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
                if isinstance(writer, MaskWriter):
                    writer.add(np.ones(9, np.uint8))
                else:
                    writer.add_document(range(9))
                raise ZeroDivisionError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def parse_run(folder, seq_length=200, *more):
    return parse(
        [
            *"--num-layers 1 --hidden-size 8 --num-attention-heads 1".split(),
            *f"--seq-length {seq_length} --max-position-embeddings 4096".split(),
            *"--micro-batch-size 1 --train-iters 1 --lr 1 --split 100,0,0".split(),
            *("--data-path", str(folder / "one_chat_document"), "--sft"),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(folder / "t"), *more),
        ],
        world_size=1,
    )


def words_of(config):
    return build_tokenizer(config.data, config.model)


def datasets_of(config):
    words = words_of(config)
    return build_datasets(config, (1, 0, 0), words)


@pytest.mark.parametrize("seq_length", [80, 200, 4000])
def test_batches_count_the_answers_and_nothing_else(folder, seq_length, caplog):
    config = parse_run(folder, seq_length)
    words = words_of(config)
    dataset = build_datasets(config, (1, 0, 0), words).train
    dataset.num_samples = dataset.per_epoch
    loader = Loader(dataset, GPT_DATA.collator(config, words), micro_batch_size=1)
    batch = loader.batch(0, dataset.per_epoch)
    corpus = IndexedDataset(folder / "one_chat_document")
    masks = LossMasks(corpus)
    # A conversation longer than a sample loses its end.
    kept = [slice(1, seq_length + 1)] * COUNT
    expected = [corpus[i][part][masks.get(i)[part] == 1] for i, part in enumerate(kept)]
    assert any(map(len, expected))
    found = batch.labels[batch.loss_mask.bool()]
    assert sorted(found.tolist()) == sorted(np.concatenate(expected).tolist())
    is_cut = corpus.lengths > seq_length + 1
    assert ("lose their end" in caplog.text) == is_cut.any()
    empty = sum(not len(answers) for answers in expected)
    words = f"{is_cut.sum()} of {COUNT} conversations are longer"
    if is_cut.any():
        assert words in caplog.text and f"{empty} of them all" in caplog.text
    assert config.train.calculate_per_token_loss and config.data.pack_documents


def test_samples_too_short_for_any_answer_are_an_error(folder):
    with pytest.raises(
        DataError, match=f"all answers of all {COUNT} conv.* after the 4"
    ):
        datasets_of(parse_run(folder, 3))


def test_answers_that_the_marks_of_a_template_leave_out_are_counted(folder, caplog):
    (folder / "marked.jinja").write_text(MISMARKED)
    more = ("--chat-template", str(folder / "marked.jinja"))
    assert preprocess(flags(folder, "left_out", *more, "--workers", "2")) == 0
    assert f"in {COUNT} conversations an answer is outside" in caplog.text
    assert bytes_of(folder / "left_out_chat_document") == bytes_of(
        folder / "one_chat_document"
    )
