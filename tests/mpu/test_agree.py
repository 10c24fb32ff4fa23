"""`mpu/agree.py`: an error of one rank, of whatever kind, reaches all ranks."""

import pytest

from megatron_ds.errors import CheckpointError, DataError, MegatronDSError
from megatron_ds.mpu.agree import gather_from_all_ranks, on_all_ranks, on_one_rank
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


@pytest.mark.parametrize(
    "error, everywhere, words",
    [
        (DataError("no corpus"), DataError, "no corpus"),
        (FileNotFoundError(2, "gone"), MegatronDSError, "gone"),
        (
            RuntimeError("a library failed"),
            MegatronDSError,
            "RuntimeError: a library failed",
        ),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_with_its_rank(error, everywhere, words):
    def main(rank, world):
        def action():
            if rank == 1:
                raise error

        group = world.group("world", range(3), rank)
        try:
            on_all_ranks(group, action)
        except Exception as caught:  # noqa: BLE001  of any kind
            return caught

    caught = run_ranks(3, main)
    for rank in (0, 2):
        assert type(caught[rank]) is everywhere and caught[rank].on_all_ranks
        assert str(caught[rank]).startswith("rank 1: ") and words in str(caught[rank])
    assert isinstance(
        caught[1], RuntimeError if isinstance(error, RuntimeError) else everywhere
    )


def test_one_rank_acts_and_all_get_its_result_or_its_error():
    def main(rank, world):
        group, calls = world.group("world", range(3), rank), []
        result = on_one_rank(group, lambda: calls.append(rank) or 10 + rank, 1)
        with pytest.raises(DataError, match="^no corpus$") as caught:
            on_one_rank(group, lambda: raise_(DataError("no corpus")), 1)
        return result, calls, caught.value.on_all_ranks

    assert run_ranks(3, main) == [(11, [], True), (11, [1], True), (11, [], True)]


def test_results_of_all_ranks_are_gathered_and_errors_of_several_are_named_with_their_ranks():
    def main(rank, world):
        group = world.group("world", range(4), rank)
        with pytest.raises(CheckpointError) as caught:
            gather_from_all_ranks(
                group,
                lambda: rank or raise_(OSError(28, "disk full")),
                doing="saving",
                kind=CheckpointError,
            )
        with pytest.raises(CheckpointError) as several:
            on_all_ranks(
                group,
                lambda: (
                    rank or raise_(ValueError("a"))
                    if rank % 2 == 0
                    else raise_(DataError("b"))
                ),
                doing="saving",
                kind=CheckpointError,
            )
        with pytest.raises(DataError, match="^same$"):
            on_all_ranks(group, lambda: raise_(DataError("same")))
        return (
            gather_from_all_ranks(group, lambda: 2 * rank),
            str(caught.value),
            str(several.value),
        )

    assert set(map(str, run_ranks(4, main))) == {
        str(
            (
                [0, 2, 4, 6],
                "saving: rank 0: OSError: [Errno 28] disk full",
                "saving: rank 0: ValueError: a; rank 1, 3: b",
            )
        )
    }


def raise_(error):
    raise error
