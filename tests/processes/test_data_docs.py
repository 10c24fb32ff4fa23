"""The commands and the code of docs/data.md work, in the order they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_blocks_of_the_data_page_run_one_after_the_other(tmp_path):
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    said = ""
    for kind, block in blocks:
        command = ["bash", "-euc", block] if kind == "bash" else [sys.executable, "-c", block]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        said += done.stdout
    assert len(blocks) == 4 and re.search(r"\d+ documents, \d+ tokens: \w", said)
