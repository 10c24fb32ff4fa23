"""A run with both curricula, from a corpus over its analysis to the end, stopped halfway and resumed with
more ranks."""

import json

import numpy as np
import pytest

from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.extensions.data_efficiency.analyze_data import main as analyze
from tests.harness.pretraining import (
    GLOBAL_BATCH,
    SEQ_LENGTH,
    STEPS,
    TINY,
    VOCAB,
    losses,
    records,
    run_file,
    run_pretrain,
    train,
)

pytestmark = pytest.mark.processes

LENGTHS = [8, 8, 12, 12, 16, 16]  # of the six steps: 6 + 2 t, down to a multiple of 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    draw, prefix = np.random.default_rng(5), tmp_path_factory.mktemp("corpus") / "text"
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in draw.integers(3, 60, size=60):
            writer.add_document(np.minimum(draw.zipf(1.4, length), VOCAB) - 1)
    return ["--data-path", str(prefix), "--split", "90,10,0"]


def curriculum(folder) -> dict:
    prefix = f"{folder}/vocab_rarity/vocab_rarity_index_to"
    rarity = {
        "index_to_sample_path": f"{prefix}_sample",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 3,
        "max_difficulty": 10,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1},
    }
    length = {
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": 6,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 4},
    }
    metrics = {"vocab_rarity": rarity, "seqlen_truncate": length}
    return {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics},
            },
        }
    }


def test_a_curriculum_goes_on_where_it_stopped_with_other_ranks(tmp_path, corpus):
    assert (
        analyze(
            [
                "--metrics",
                "vocab_rarity",
                "--output",
                str(tmp_path / "analysis"),
                "--num-shards",
                "2",
                *TINY,
                *corpus,
            ]
        )
        == 0
    )
    (tmp_path / "ds.json").write_text(json.dumps(curriculum(tmp_path / "analysis")))
    plain = [
        *TINY[: TINY.index("--eval-iters")],
        *TINY[TINY.index("--eval-iters") + 2 :],
        *corpus,
        *f"--train-iters {STEPS} --eval-iters 1 --eval-interval 3".split(),
    ]
    job = [*plain, "--deepspeed_config", tmp_path / "ds.json"]
    train(1, [*job, "--save", tmp_path / "whole"])
    stopping = [
        *job,
        "--save",
        tmp_path / "parts",
        "--load",
        tmp_path / "parts",
        "--exit-interval",
        "3",
    ]
    train(1, stopping)
    train(2, stopping)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert list(parts) == [1, 2, 3, 4, 5, 6] and parts == pytest.approx(whole, rel=1e-6)
    assert [record["seq_length"] for record in records(tmp_path / "parts")] == LENGTHS
    tokens = GLOBAL_BATCH * sum(LENGTHS)
    assert run_file(tmp_path / "whole", STEPS)["progress"]["tokens"] == tokens
    assert (
        run_file(tmp_path / "parts", STEPS)["progress"]
        == run_file(tmp_path / "whole", STEPS)["progress"]
    )

    document = curriculum(tmp_path / "analysis")
    learning = document["data_efficiency"]["data_sampling"]["curriculum_learning"]
    del learning["curriculum_metrics"]["seqlen_truncate"]
    (tmp_path / "whole.json").write_text(json.dumps(document))
    at_full_length = [
        *plain,
        "--deepspeed_config",
        tmp_path / "whole.json",
        "--load",
        tmp_path / "whole",
    ]
    train(1, [*at_full_length, "--save", tmp_path / "evaluated"])
    evaluations = [
        records(tmp_path / name, "validation")[-1]["loss"]
        for name in ("whole", "evaluated")
    ]
    assert evaluations[0] == evaluations[1]

    # the order of the samples would be another
    refused = run_pretrain(1, [*plain, "--load", tmp_path / "whole"])[0]
    assert refused.code == 2 and "curriculum" in refused.err
    train(1, [*plain, "--save", tmp_path / "plain"])
    assert (
        run_file(tmp_path / "plain", STEPS)["progress"]["tokens"]
        == GLOBAL_BATCH * SEQ_LENGTH * STEPS
    )
    assert losses(tmp_path / "plain")[1] != pytest.approx(whole[1], rel=1e-4)


def test_a_run_in_tokens_ends_and_decays_by_the_tokens_that_were_trained_on(tmp_path):
    job = [
        *TINY,
        *(
            "--lr-warmup-iters 0 --mock-data --train-tokens 300 --train-iters 99 "
            "--lr-warmup-tokens 64 --lr-decay-style linear --min-lr 0 --curriculum-type seqlen "
            "--curriculum-min-length 8 --curriculum-steps 4 --curriculum-length-step 4"
        ).split(),
        "--save",
        tmp_path,
        "--load",
        tmp_path,
    ]
    train(1, [*job, "--exit-interval", "2"])
    train(2, job)
    found, tokens = records(tmp_path), 0
    assert [record["seq_length"] for record in found] == [8, 12, 12, 16, 16, 16]
    for record in found:
        rate = tokens / 64 if tokens <= 64 else (300 - tokens) / (300 - 64)
        assert (
            record["learning_rate"] == pytest.approx(1e-3 * rate)
            and record["steps"] == 6
        )
        tokens += GLOBAL_BATCH * record["seq_length"]
        assert record["tokens"] == tokens
    assert tokens - GLOBAL_BATCH * 16 < 300 <= tokens
