"""`pretrain_bert.py` from a corpus of sentences to a checkpoint, and on from there at another layout."""

import re

import pytest

from megatron_ds.data.text.indexed import IndexedWriter
from tests.harness.pretraining import (
    TINY,
    losses,
    records,
    run_pretrain,
    saved_state,
    train,
)
from tests.harness.sentences import write_sentences

pytestmark = pytest.mark.processes

BERT = [
    *TINY,
    *"--model bert --train-iters 6 --eval-iters 1 --eval-interval 6 --split 80,20,0".split(),
]
DATA = "--tokenizer-type HuggingFaceTokenizer --seq-length 24 --max-position-embeddings 24".split()


def test_a_bert_goes_on_at_another_layout_from_a_corpus_of_sentences(tmp_path):
    corpus, tokenizer = write_sentences(tmp_path)
    job = [*BERT, *DATA, "--data-path", corpus, "--tokenizer-model", tokenizer]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    [alone] = train(1, [*job, "--save", whole])
    train(
        2,
        [
            *job,
            "--save",
            parts,
            *"--tensor-model-parallel-size 2 --sequence-parallel --exit-interval 3".split(),
        ],
    )
    train(
        2,
        [
            *job,
            "--save",
            parts,
            "--load",
            parts,
            *"--pipeline-model-parallel-size 2 --zero-stage 3".split(),
        ],
    )
    assert list(losses(parts)) == [1, 2, 3, 4, 5, 6]
    for step, loss in losses(whole).items():
        # sums in another order, carried on by Adam
        assert losses(parts)[step] == pytest.approx(loss, rel=1e-5)
    one, other = (
        records(folder, kind) for folder in (whole, parts) for kind in ("validation",)
    )
    assert other[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    assert other[0]["sop_loss"] == pytest.approx(one[0]["sop_loss"], rel=1e-4)
    assert {
        "weight/binary_head.weight",
        "weight/lm_head.dense.bias",
        "weight/output_layer.bias",
    } <= set(saved_state(parts, 6))
    assert re.search(r"\| lm loss: [\d.E+-]+ \| sop loss: [\d.E+-]+ \|", alone.out)

    [refused] = run_pretrain(
        1, [*job, "--load", parts, "--train-iters", "7", "--bert-no-binary-head"]
    )
    assert (
        refused.code
        and "model.bert_binary_head: checkpoint True, this run False"
        in refused.out + refused.err
    )
    [refused] = run_pretrain(
        1, [*job, "--load", parts, "--train-iters", "7", "--mask-prob", "0.3"]
    )
    assert (
        refused.code
        and "data.mask_prob: checkpoint 0.15, this run 0.3" in refused.out + refused.err
    )


def test_a_corpus_of_whole_documents_is_refused_with_what_to_do(tmp_path):
    _, tokenizer = write_sentences(tmp_path)
    with IndexedWriter(tmp_path / "whole_text_document", "uint16") as writer:
        for _ in range(9):
            writer.add_document([7, 8, 9, 10] * 5)
    [ended] = run_pretrain(
        1,
        [
            *BERT,
            *DATA,
            "--data-path",
            tmp_path / "whole_text_document",
            "--tokenizer-model",
            tokenizer,
        ],
    )
    assert (
        ended.code == 2
        and "--split-sentences" in ended.out + ended.err
        and "Traceback" not in ended.err
    )
