"""What depths do not compose with is refused, with a remedy."""

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.models import MODELS
from megatron_ds.models.identity import model_identity
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.pipeline.stage_bounds import parse_layout

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


def test_ranks_divide_the_projection_equally():
    flags = [*SIZES, *ROPE, "--mtp-num-layers", "1", "--kv-channels", "6"]
    flags += ["--hidden-size", "30"]
    parse([*flags, "--tensor-model-parallel-size", "2"], world_size=2)
    with pytest.raises(ConfigError, match="4 tensor-parallel ranks divide the 30 rows"):
        parse([*flags, "--tensor-model-parallel-size", "4"], world_size=4)


def staged(layout: str, depths: str, stages: int = 2):
    flags = [*SIZES, *ROPE, "--mtp-num-layers", depths, "--pipeline-layout", layout]
    pipeline = ["--pipeline-model-parallel-size", str(stages)]
    return parse([*flags, *pipeline], world_size=stages)


@pytest.mark.parametrize("layout", ["Et|tmmL", "Et|tm*2", "t|tL", "Ett|mmL"])
def test_a_layout_of_megatron_places_the_depths_before_the_head(layout):
    config = staged(layout, "2")
    layers = MODELS["gpt"](config.model, ParallelContext())
    last = 3 if "tt" in layout else 2
    blocks = [layer.is_block for layer in layers]
    assert parse_layout(layout, blocks, 2) == (0, last, len(layers))


@pytest.mark.parametrize(
    "layout, depths, words",
    [
        ("Et|tmL", "2", "has 1 depths .* Give as many, or none"),
        ("Et|tmL", "0", "has 1 depths"),
        ("Etm|tmL", "2", "another stage than the output layer"),
        ("Et|tm|L", "1", "another stage than the output layer .* such as |t\\*2mL"),
        ("Et|t|mL|", "1", "another stage than the output layer"),
    ],
)
def test_a_layout_with_the_depths_elsewhere_is_refused(layout, depths, words):
    with pytest.raises(ConfigError, match=words):
        staged(layout, depths, 1 + layout.count("|"))


def test_a_weight_without_depths_has_no_effect_and_is_refused():
    with pytest.raises(ConfigError, match="mtp-num-layers"):
        parse([*SIZES, *ROPE, "--mtp-loss-scaling-factor", "0.3"])


def test_depths_are_part_of_what_a_checkpoint_must_have_alike():
    plain = parse([*SIZES, *ROPE]).model
    predicting = parse([*SIZES, *ROPE, "--mtp-num-layers", "2"]).model
    assert "mtp_num_layers" not in model_identity(plain)
    assert model_identity(predicting)["mtp_num_layers"] == 2
