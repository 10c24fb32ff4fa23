"""Flags of commands that load a model: an unknown one is named before what the others lack, and what only a training
cannot do is allowed."""

import pytest

from megatron_ds.commands import checkpoint_to_safetensors, verify_checkpoint
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError, MegatronDSError
from megatron_ds.extensions.evaluation import evaluate
from megatron_ds.extensions.generation import generate_text
from megatron_ds.extensions.serving import serve
from megatron_ds.planning.run_plan import RULES

pytestmark = pytest.mark.plan


@pytest.mark.parametrize(
    "command, flags",
    [
        (generate_text, []),
        (evaluate, ["--data", "x"]),
        (serve, ["--port", "70000"]),
    ],
)
def test_an_unknown_flag_is_named_before_what_is_missing(command, flags):
    with pytest.raises(ConfigError, match="unknown flag --bogus"):
        command.run_tool(["--load", "A", *flags, "--bogus"])


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    args = verify_checkpoint.parse_arguments(["--load", str(file)])
    with pytest.raises(MegatronDSError, match=f"{file}"):
        verify_checkpoint.main(args)


def test_weights_are_not_exported_into_the_folder_of_a_run(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    given = ["--load", str(tmp_path), "--output", str(tmp_path)]
    args = checkpoint_to_safetensors.parse_arguments(given)
    with pytest.raises(ConfigError, match="holds the checkpoints of a run"):
        checkpoint_to_safetensors.main(args)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_router_that_would_not_learn_is_refused_only_where_it_learns():
    flags = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 16 --mock-data "
        "--micro-batch-size 1 --num-experts 4 --moe-router-topk 1 --train-iters 1 --lr 1e-3"
    ).split()
    with pytest.raises(ConfigError, match="would not learn"):
        parse(flags, rules=RULES)
    assert parse([*flags, "--skip-train"], rules=RULES).model.moe_router_topk == 1
