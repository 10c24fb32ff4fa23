"""The pages are correct: their commands run, their launches parse, their links and their tables hold."""

import math
import re
from contextlib import chdir

import pytest

from tests.harness.documents import (
    MARKS,
    ROOT,
    RUNNABLE,
    are_same_line,
    blocks_of,
    pages,
    run_page,
)
from tests.harness.launches import sbatch_environment, started_by, trainings

pytestmark = pytest.mark.processes

# Output of blocks that is not shown on the page.
SAID = {
    "docs/start/data.md": r"\d+ documents, \d+ tokens: \w",
    "docs/scale/checkpoints.md": r"step 12 of 12 saved by 2 ranks",
    "docs/start/quickstart.md": r"On day 7.* walked to (.|\n)*did you mean '--num-attention-heads'",
    "README.md": r"loaded runs/tiny, iteration 10",
}

BLOCKS = [block for page in pages() for block in blocks_of(page)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.runs}))
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    said = run_page(page, tmp_path)
    assert "Traceback" not in said and re.search(SAID.get(page, ""), said)
    if page == "README.md":
        check_that_layouts_print_one_loss(said)


def test_printed_lines_are_compared_to_the_rounding_of_fp32():
    shown = "perplexity 93.181427, 4 ranks"
    assert are_same_line(shown, "perplexity 93.181423, 4 ranks")
    for other in (
        "perplexity 93.181527, 4 ranks",
        "perplexity 93.181427, 5 ranks",
        "loss 93.181427, 4 ranks",
    ):
        assert not are_same_line(shown, other)


def check_that_layouts_print_one_loss(said):
    """Each loss of README's table is printed by the run of its row. Another processor may round the last
    digit otherwise."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(
        r"^\| `lm loss` at step ((?:\| \d+ )+)\|\n.*\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    steps = [int(step) for step in re.findall(r"\d+", table[1])]
    rows = [
        [cell.strip() for cell in row.split("|")[2:-1]] for row in table[2].splitlines()
    ]
    shown = [
        (step, float(loss))
        for row in rows
        for step, loss in zip(steps, row, strict=True)
        if loss
    ]
    printed = [
        (int(step), float(loss))
        for step, loss in re.findall(r"iteration +(\d+)/ +20 .* lm loss: (\S+)", said)
    ]
    assert [step for step, _ in shown] == [step for step, _ in printed] and len(
        rows
    ) == 3
    of_one_process = dict(printed[: len(steps)])
    for (step, loss), (_, in_table) in zip(printed, shown):
        assert math.isclose(loss, of_one_process[step], rel_tol=1e-6) and math.isclose(
            loss, in_table, rel_tol=1e-5
        )


@pytest.mark.quick
def test_a_page_names_the_virtual_environment_before_its_first_command():
    first = {}
    for block in BLOCKS:
        if block.runs and block.language == "bash":
            first.setdefault(block.page, block)
    without = []
    for page, block in first.items():
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        if not any("source .venv/bin/activate" in line for line in lines[: block.line]):
            without.append(f"{block}: the activation is not given")
    assert len(first) > 20 and not without


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.mark == "needs GPUs"], ids=str
)
def test_a_block_for_gpus_starts_ranks_that_would_train(block, tmp_path):
    found = trainings(started_by(block.text, tmp_path), sbatch_environment(block.text))
    assert found
    with chdir(ROOT):
        for started in found:
            assert started.config().world_size == started.world_size > 1


@pytest.mark.quick
def test_every_mark_is_one_that_this_test_knows_and_files_are_used():
    for block in BLOCKS:
        assert not block.mark or MARKS.fullmatch(block.mark), f"{block}: {block.mark}"
        if block.file:
            later = [
                b
                for b in BLOCKS
                if b.page == block.page
                and b.line > block.line
                and (b.runs or b.mark.startswith("runs in"))
            ]
            assert any(block.file in b.text for b in later), (
                f"{block}: {block.file} is not used"
            )


def test_no_block_escapes():
    """Every fence matches the pattern, and commands are marked as bash; otherwise they would not be run."""
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
        assert fences == 2 * sum(block.page == page for block in BLOCKS), page
    for block in BLOCKS:
        assert block.language in (*RUNNABLE, "yaml", "json", "text"), (
            f"{block}: ```{block.language}"
        )
        assert block.language != "text" or not re.search(
            r"^(\$ )?(python|torchrun|make|bash) ", block.text, re.M
        ), block


@pytest.mark.quick
def test_links_lead_somewhere():
    lost = [
        f"{page}: {target}"
        for page in pages()
        for target in re.findall(
            r"\]\(([^)#\s]*)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")
        )
        if target and "://" not in target
        if not ((ROOT / page).parent / target).exists()
    ]
    assert not lost


@pytest.mark.quick
def test_what_a_block_leaves_to_other_commands_exists():
    for block in BLOCKS:
        for command in re.findall(r"runs in: (.*)", block.mark):
            for name in re.findall(r"make (\S+?)(?:,|$)", command):
                assert re.search(
                    rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE
                ), f"{block}: make {name}"
            for path in re.findall(r"tests/\S+", command):
                assert (ROOT / path).exists(), f"{block}: {path}"
