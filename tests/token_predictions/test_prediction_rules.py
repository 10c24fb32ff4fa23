"""What depths do not compose with is refused, with a remedy."""

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.models.identity import model_identity

pytestmark = pytest.mark.plan

SIZES = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data "
    "--train-iters 2 --lr 1e-3 --micro-batch-size 1 --global-batch-size 4"
).split()
ROPE = ("--position-embedding-type", "rope")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("", "vector of its position"),
        ("--position-embedding-type rope --embed-layernorm", "a norm of its own"),
        ("--position-embedding-type none --model bert", "sees the tokens"),
        (
            "--position-embedding-type rope --distill-from runs/teacher",
            "another objective than the next token",
        ),
    ],
)
def test_a_model_without_depths_is_named(flags, words):
    with pytest.raises(ConfigError, match=words):
        parse([*SIZES, "--mtp-num-layers", "1", *flags.split()])


def test_the_last_depth_has_a_token_to_predict():
    with pytest.raises(ConfigError, match="--mtp-num-layers 15 or fewer"):
        parse([*SIZES, *ROPE, "--mtp-num-layers", "16"])
    parse([*SIZES, *ROPE, "--mtp-num-layers", "15"])


def test_a_weight_without_depths_has_no_effect_and_is_refused():
    with pytest.raises(ConfigError, match="mtp-num-layers"):
        parse([*SIZES, *ROPE, "--mtp-loss-scaling-factor", "0.3"])


def test_depths_are_part_of_what_a_checkpoint_must_have_alike():
    plain = parse([*SIZES, *ROPE]).model
    predicting = parse([*SIZES, *ROPE, "--mtp-num-layers", "2"]).model
    assert "mtp_num_layers" not in model_identity(plain)
    assert model_identity(predicting)["mtp_num_layers"] == 2
