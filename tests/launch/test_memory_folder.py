"""The folder of an agent: folders of agents that were killed go, those of others stay."""

import os
import signal

import pytest

from megatron_ds.extensions.launch.memory_folder import folder_in_memory
from tests.harness.deaths import forked, survived

pytestmark = pytest.mark.plan


def test_a_folder_of_a_killed_agent_is_removed_by_the_next_one(tmp_path):
    (tmp_path / "megatron-ds-of-another-version").mkdir()

    def die():
        with folder_in_memory(tmp_path) as folder:
            (folder / "places0").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)

    assert not survived(forked(die))
    [left] = tmp_path.glob("megatron-ds-*/places0")
    with folder_in_memory(tmp_path) as mine:
        assert not left.exists()
        # a second agent of this host leaves the folder of the first one
        with folder_in_memory(tmp_path) as other:
            assert mine.is_dir() and other.is_dir() and mine != other
        assert mine.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [
        "megatron-ds-of-another-version"
    ]
