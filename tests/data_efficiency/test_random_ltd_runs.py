"""Runs with blocks that drop tokens, on real ranks: what they log, and that they go on as if they had never
stopped."""

import pytest

from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    SEQ_LENGTH,
    STEPS,
    records,
    same_bits,
    saved_state,
    train,
)

pytestmark = pytest.mark.processes

LTD = (
    f"--random-ltd --random-ltd-min-tokens 4 --random-ltd-steps {STEPS - 1} "
    "--random-ltd-tokens-per-step 4 --random-ltd-layer-ids 0"
).split()
SHORT_FIRST = (
    "--curriculum-type seqlen_truncate --curriculum-min-length 8 --curriculum-steps 4 "
    "--curriculum-length-step 4"
).split()


@pytest.mark.quick
def test_a_run_goes_on_with_the_tokens_that_it_would_have_kept(tmp_path):
    job = [*MOCK, *LTD, *SHORT_FIRST]
    sp = "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1".split()
    train(2, [*job, *sp, "--save", tmp_path / "whole", "--save-interval", STEPS // 2])
    for _ in range(2):
        train(
            2,
            [
                *job,
                *sp,
                "--save",
                tmp_path / "parts",
                "--load",
                tmp_path / "parts",
                "--exit-interval",
                STEPS // 2,
            ],
        )
    assert same_bits(
        saved_state(tmp_path / "whole", STEPS), saved_state(tmp_path / "parts", STEPS)
    )
    told = ["kept_tokens", "layer_tokens", "actual_seq_length", "tokens", "loss"]
    whole, parts = (
        [[record[name] for name in told] for record in records(tmp_path / folder)]
        for folder in ("whole", "parts")
    )
    assert whole == parts

    lengths = [record["seq_length"] for record in records(tmp_path / "whole")]
    kept = [
        min(4 + 12 * t // (STEPS - 1) // 4 * 4, length)
        for t, length in enumerate(lengths)
    ]
    assert [row[0] for row in whole] == kept and kept[0] < kept[-1] == SEQ_LENGTH
    seen = [
        GLOBAL_BATCH * (k + length) for k, length in zip(kept, lengths)
    ]  # two blocks, of which one drops
    assert [row[1] for row in whole] == [sum(seen[:i]) for i in range(1, STEPS + 1)]
    assert [row[2] for row in whole] == [
        (k + length) // 2 for k, length in zip(kept, lengths)
    ]
