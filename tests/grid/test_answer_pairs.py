"""Pairs of answers train at every layout as in one process."""

import numpy as np
import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.text.indexed import IndexedDataset
from megatron_ds.data.text.mask_file import LossMasks
from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.extensions.preference.answer_pairs import (
    PREFERENCE_DATA,
    PairDataset,
)
from megatron_ds.extensions.preference.first_model import score_pairs
from megatron_ds.mpu.mesh import Mesh
from tests.harness.answer_pairs import write_pairs
from tests.harness.layout_comparison import (
    Difference,
    difference,
    merge,
    parse_layout,
    train_layout,
)
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job
from tests.planning.test_rank_plan import check

pytestmark = [pytest.mark.threads, pytest.mark.one_in(4)]

PAIRS = 10
SIZE = 4
STEPS = 3
# A margin is the difference of sums that are a hundred times as large, and so is its rounding.
LIMIT = Difference(loss=1e-5, grad_norm=1e-5, weights=1e-5)
LORA = "--lora-rank 2 --lora-alpha 8"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("pairs") / "p"
    write_pairs(prefix, PAIRS, VOCAB - 1, SEQ_LENGTH // 2)
    return prefix


@pytest.fixture(scope="module")
def one_process():
    """Runs of one process, by job and micro-batch size."""
    return {}


def flags(style: str, more: str) -> list[str]:
    job = tiny_job(style, "fp32", True, 0.0, 2, SIZE, 20, samples="packed")
    job.remove("--pack-documents")
    job.remove("--eod-mask-loss")
    return [*job, "--dpo", "--dpo-beta", "2", *more.split()]


def run(job: list[str], layout: str, prefix):
    """((trace, weights), scores of the reference)"""
    request = parse_layout(layout, mbs="1")
    config = parse([*job, *request.flags], world_size=request.world_size)
    grid = config.grid(request.world_size)
    scores = {}

    def main(rank, world):
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        dataset = PREFERENCE_DATA.open(
            IndexedDataset(prefix),
            range(PAIRS),
            title="",
            num_samples=100,
            config=config,
            tokenizer=None,
        )
        collate = PREFERENCE_DATA.collator(config, NullTokenizer(VOCAB - 1))

        def fill(engine):
            dataset.reference = score_pairs(
                engine, dataset, np.arange(len(dataset.pairs)), collate
            )
            scores[rank] = dataset.reference

        return train_layout(config, mesh, STEPS, dataset, watch=fill)

    merged = merge(run_ranks(request.world_size, main))
    for found in scores.values():
        assert np.array_equal(found, scores[0])
    return merged, scores[0], config


@pytest.mark.parametrize(
    "style, layout, more",
    [
        ("llama", "tp=2,sp=1", ""),
        ("gpt2", "pp=2,dp=2,zero=2", ""),
        ("llama", "cp=2,tp=2", LORA),
        ("llama", "dp=2,zero=3,mbs=2", ""),
        ("gpt2", "cp=2,pp=2,zero=1", "--data-readers first"),
        ("llama", "pp=2,tp=2,sp=1,logits=2", ""),
        ("llama", "ep=2,dp=2,zero=2", EXPERTS),
        ("llama", "pp=2,schedule=zb-v,dp=2,zero=3", LORA),
        ("gpt2", "cp=4,comm_type=a2a", ""),
    ],
)
def test_pairs_train_like_in_one_process(prefix, one_process, style, layout, more):
    job = flags(style, more)
    merged, scores, config = run(job, layout, prefix)
    reference = parse_layout(layout, mbs="1").reference
    key = (*job, reference)
    if key not in one_process:
        one_process[key] = run(job, reference, prefix)
    expected, expected_scores, _ = one_process[key]
    assert scores == pytest.approx(expected_scores, rel=1e-5)
    apart = difference(merged, expected, config.model)
    assert apart.is_within(LIMIT), apart
    # The first step is at the reference, and later ones are not.
    names = ("reward chosen", "reward rejected", "reward margin", "reward accuracy")
    found, wanted = merged[0], expected[0]
    for name in names:
        assert [m[name] for m in found.metrics] == pytest.approx(
            [m[name] for m in wanted.metrics], rel=1e-4, abs=1e-5
        )
    assert found.losses[0] == pytest.approx(np.log(2), rel=1e-5)
    assert found.losses[-1] != pytest.approx(np.log(2), rel=1e-3)


@pytest.mark.parametrize("layout", ["cp=2,pp=2", "tp=2,dp=2,zero=3"])
def test_every_rank_sends_and_holds_what_was_planned(prefix, layout):
    masks = LossMasks(IndexedDataset(prefix))
    dataset = PairDataset(masks, range(PAIRS), SEQ_LENGTH, 100, 1)
    dataset.reference.fill(-10.0)
    check(flags("llama", LORA), layout, dataset)
