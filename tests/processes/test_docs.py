"""The pages tell the truth: their commands run, their launches are understood, their links and their table hold."""

import re
from contextlib import chdir

import pytest

from tests.harness.documents import MARKS, ROOT, RUNNABLE, blocks_of, pages, run_page
from tests.harness.launches import sbatch_environment, started_by, trainings

# What is told by blocks whose output is not on the page.
SAID = {"docs/data.md": r"\d+ documents, \d+ tokens: \w", "docs/checkpoints.md": r"step 12 of 12 saved by 2 ranks",
        "docs/quickstart.md": r"On day 7.* walked to (.|\n)*did you mean '--num-attention-heads'",
        "README.md": r"loaded runs/tiny, iteration 10"}

BLOCKS = [block for page in pages() for block in blocks_of(page)]


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.runs}))
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    said = run_page(page, tmp_path)
    assert "Traceback" not in said and re.search(SAID.get(page, ""), said)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "needs GPUs"], ids=str)
def test_a_block_for_gpus_starts_ranks_that_would_train(block, tmp_path):
    found = trainings(started_by(block.text, tmp_path), sbatch_environment(block.text))
    assert found
    with chdir(ROOT):
        for started in found:
            assert started.config().world_size == started.world_size > 1


def test_every_mark_is_one_that_this_test_knows_and_files_are_used():
    for block in BLOCKS:
        assert not block.mark or MARKS.fullmatch(block.mark), f"{block}: {block.mark}"
        if block.file:
            later = [b for b in BLOCKS if b.page == block.page and b.line > block.line and b.runs]
            assert any(block.file in b.text for b in later), f"{block}: nobody uses {block.file}"


def test_no_block_escapes():
    """A fence that the pattern does not see, or a command in another language's name, would be run by nobody."""
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
        assert fences == 2 * sum(block.page == page for block in BLOCKS), page
    for block in BLOCKS:
        assert block.language in (*RUNNABLE, "yaml", "json", "text"), f"{block}: ```{block.language}"
        assert block.language != "text" or not re.search(r"^(\$ )?(python|torchrun|make|bash) ", block.text, re.M), block


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", text):
        if target and "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_what_a_block_leaves_to_other_commands_exists():
    for block in BLOCKS:
        for command in re.findall(r"runs in: (.*)", block.mark):
            for name in re.findall(r"make (\S+?)(?:,|$)", command):
                assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{block}: make {name}"
            for path in re.findall(r"tests/\S+", command):
                assert (ROOT / path).exists(), f"{block}: {path}"
