import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes


def test_a_process_killed_at_any_moment_of_a_save_leaves_the_previous_checkpoint_or_the_new_one(
    tmp_path,
):
    answer = subprocess.run(
        [warm_python(), "-m", "tests.checkpoint.crashing_saves", str(tmp_path), "7"],
        capture_output=True,
        text=True,
        timeout=HUNG,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    new_step, step_again, behind, *saves_before_kills = map(int, answer.stdout.split())
    # the deaths were inside the saves
    assert min(new_step, step_again, behind) > 10
    # one at least before each kill
    assert len(saves_before_kills) == 2 and min(saves_before_kills) >= 12
