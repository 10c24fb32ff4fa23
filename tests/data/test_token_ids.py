"""Numbers of a corpus that are no token ids are refused with the file's name, by every reader."""

import struct

import numpy as np
import pytest

from megatron_ds.cli import main_guard
from megatron_ds.commands import prepare_cache
from megatron_ds.data.samples.gpt_corpus import open_gpt_dataset
from megatron_ds.data.samples.packing import open_packed_dataset
from megatron_ds.data.text.indexed import HEADER, IndexedDataset, IndexedWriter
from megatron_ds.errors import DataError
from megatron_ds.extensions.corpora import inspect_dataset, merge_datasets
from megatron_ds.extensions.data_efficiency import analyze_data

pytestmark = pytest.mark.plan

DTYPES = (np.int8, np.int16, np.int32, np.int64)
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 4 "
    "--micro-batch-size 2 --train-iters 2 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 99 --split 100,0,0"
).split()


def corpus_with(bad, dtype, prefix):
    """A corpus of 20 documents of 7 ids; document 13 has `bad` in its middle."""
    with IndexedWriter(prefix, dtype) as writer:
        for _ in range(20):
            writer.add_document(np.arange(7))
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek((13 * 7 + 3) * np.dtype(dtype).itemsize)
        file.write(np.array(bad, dtype).tobytes())
    return IndexedDataset(prefix)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("bad", [-1, -7])
@pytest.mark.parametrize("opener", [open_gpt_dataset, open_packed_dataset])
def test_a_negative_id_is_refused_in_the_sample_that_has_it(
    opener, bad, dtype, tmp_path
):
    corpus = corpus_with(bad, dtype, tmp_path / "c")
    dataset = opener(
        corpus,
        range(20),
        title="GPTDataset-train",
        seq_length=4,
        num_samples=None,
        seed=3,
    )
    refused = []
    for i in range(len(dataset)):
        try:
            assert dataset[i]["tokens"].min() >= (
                0 if opener is open_gpt_dataset else -1
            )
        except DataError as error:
            refused.append(str(error))
    assert 1 <= len(refused) <= 2  # two samples share the token at their border
    assert all(
        "c.bin: sample" in text and f"token id {bad}" in text for text in refused
    )


def test_a_writer_refuses_negative_ids(tmp_path):
    with (
        pytest.raises(DataError, match="ids from -1 to 3 do not fit int32"),
        IndexedWriter(tmp_path / "c", np.int32) as writer,
    ):
        writer.add_document([3, -1])


def test_the_check_of_a_corpus_names_the_sequence_of_a_negative_id(tmp_path, capsys):
    corpus_with(-1, np.int32, tmp_path / "c")
    assert inspect_dataset.main([str(tmp_path / "c"), "--check"]) == 2
    assert "c.bin: sequence 13 has token id -1" in capsys.readouterr().err


@pytest.fixture(params=["float64", "float32"])
def real_corpus(request, tmp_path):
    """(prefix, number format) of a corpus whose header has the code of a real number."""
    code = {"float64": 6, "float32": 7}[request.param]
    values = np.arange(20, dtype=request.param)
    (tmp_path / "c.bin").write_bytes(values.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 1, 2)
    assert len(header) == HEADER.size
    (tmp_path / "c.idx").write_bytes(header + struct.pack("<iqqq", 20, 0, 0, 1))
    return str(tmp_path / "c"), request.param


TOOLS = {
    "inspect": lambda prefix: inspect_dataset.main([prefix]),
    "merge": lambda prefix: merge_datasets.main(
        ["--input", prefix, "--output-prefix", prefix + "_out"]
    ),
    "analyze": lambda prefix: analyze_data.main(
        [
            "--metrics",
            "seqlen",
            "--output",
            prefix + "_metrics",
            "--data-path",
            prefix,
            *FLAGS,
        ]
    ),
    "prepare_cache": lambda prefix: prepare_cache.main(["--data-path", prefix, *FLAGS]),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_real_numbers_are_refused_with_the_files_name(tool, real_corpus, capsys):
    prefix, name = real_corpus
    assert main_guard(lambda: TOOLS[tool](prefix)) == 2
    error = capsys.readouterr().err
    assert (
        f"{prefix}.idx: its tokens are {name} numbers" in error
        and "Traceback" not in error
    )
