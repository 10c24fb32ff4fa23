"""docs/scale/long_sequences.md: its picture is what the tool draws today."""

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.report.draw_context import (
    main,
    owners,
    parse_arguments,
    shares,
)
from tests.harness.documents import ROOT

pytestmark = pytest.mark.plan


def test_the_picture_of_the_page_is_what_its_command_makes(tmp_path):
    main(
        parse_arguments(
            ["--context-parallel-size", "4", "--output", str(tmp_path / "drawn.svg")]
        )
    )
    kept = ROOT / "docs/pictures/context_parallel.svg"
    assert (tmp_path / "drawn.svg").read_text() == kept.read_text()
    assert (
        "](../pictures/context_parallel.svg)"
        in (ROOT / "docs/scale/long_sequences.md").read_text()
    )


def test_chunks_have_their_ranks_and_scores():
    assert owners(2, True) == [0, 1, 1, 0] and owners(2, False) == [0, 0, 1, 1]
    assert shares(owners(4, True)) == [0.25] * 4 and shares(owners(2, False)) == [
        0.25,
        0.75,
    ]


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--context-parallel-size", "1", "--output", "a.svg"], "Use 2 or more"),
        (["--output", "a.png"], "not a .svg file"),
    ],
)
def test_what_cannot_be_drawn_is_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        main(parse_arguments(flags))
