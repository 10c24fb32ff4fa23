"""`training/together.py`: an error of one rank, of whatever kind, reaches all ranks."""

import pytest

from megatron_ds.errors import DataError, MegatronDSError
from megatron_ds.mpu.agree import together
from tests.harness.threads import run_ranks


@pytest.mark.parametrize("error, everywhere, words", [
    (DataError("no corpus"), DataError, "no corpus"),
    (FileNotFoundError(2, "gone"), MegatronDSError, "gone"),
    (RuntimeError("a library failed"), MegatronDSError, "RuntimeError: a library failed")])
def test_an_error_of_one_rank_is_raised_on_all_with_its_rank(error, everywhere, words):
    def main(rank, world):
        def action():
            if rank == 1:
                raise error

        group = world.group("world", range(3), rank)
        try:
            together(group, action)
        except Exception as caught:  # noqa: BLE001  of any kind
            return caught

    caught = run_ranks(3, main)
    for rank in (0, 2):
        assert type(caught[rank]) is everywhere and caught[rank].on_all_ranks
        assert str(caught[rank]).startswith("on rank(s) 1 of 3: ") and words in str(caught[rank])
    assert isinstance(caught[1], RuntimeError if isinstance(error, RuntimeError) else everywhere)
