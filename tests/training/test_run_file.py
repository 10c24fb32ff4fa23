"""run.json: its values are validated, and a change of any of them is noticed."""

import json
from dataclasses import replace

import pytest

from megatron_ds.checkpoint.load import latest, read_run
from megatron_ds.checkpoint.run_file import require
from megatron_ds.checkpoint.save import save
from megatron_ds.config.options.model import ModelConfig
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.group import solo
from megatron_ds.training.run_checkpoint import model_identity
from tests.harness.checkpoints import (
    NEW,
    RUN,
    make_format_1,
    rewrite_run,
    save_small,
    some_pieces,
)

pytestmark = pytest.mark.plan

WRONG = {
    "step as text": dict(step="4"),
    "step true": dict(step=True),
    "step of another": dict(step=99),
    "no step": dict(step=None),
    "empty progress": dict(progress={}),
    "progress of another step": dict(progress=RUN["progress"] | {"step": 3}),
    "samples negative": dict(progress=RUN["progress"] | {"samples": -5}),
    "samples 1e30": dict(progress=RUN["progress"] | {"samples": 1e30}),
    "samples 10**30": dict(progress=RUN["progress"] | {"samples": 10**30}),
    "samples 1.5": dict(progress=RUN["progress"] | {"samples": 1.5}),
    "samples null": dict(progress={"step": 4, "samples": None}),
    "more scheduled than consumed": dict(
        progress=RUN["progress"] | {"scheduled_samples": 17}
    ),
    "more skipped than done": dict(progress=RUN["progress"] | {"skipped_steps": 5}),
    "progress a list": dict(progress=[4]),
    "optimizer empty": dict(optimizer={}),
    "optimizer a number": dict(optimizer=4),
    "updates negative": dict(optimizer={"num_updates": -1}),
    "updates null": dict(optimizer={"num_updates": None}),
    "loss scale alone": dict(optimizer={"num_updates": 4, "loss_scale": 2.0}),
    "loss scale nan": dict(
        optimizer={
            "num_updates": 4,
            "loss_scale": float("nan"),
            "loss_scale_lives": 1,
            "loss_scale_last_overflow": -1,
            "loss_scale_iteration": 4,
        }
    ),
    "config a text": dict(config="x"),
    "identity a list": dict(identity=[]),
    "world size 0": dict(world_size=0),
}


@pytest.mark.parametrize("format_1", [False, True])
@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_wrong_values_in_run_json_are_refused_even_with_a_checksum_that_fits(
    changes, format_1, tmp_path
):
    path = save_small(tmp_path)
    if format_1:
        make_format_1(path)
        run = json.loads((path / "run.json").read_text()) | changes
        (path / "run.json").write_text(
            json.dumps(
                {name: value for name, value in run.items() if value is not None}
            )
        )
    else:
        rewrite_run(path, **changes)
    with pytest.raises(CheckpointError, match="run.json is damaged, or was changed"):
        read_run(tmp_path, NEW)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "4",
        "null",
        '{"format_version": true}',
        '{"format_version": 0}',
        '{"format_version": "1"}',
        '{"format_version": 1}',
        '{"format_version": 2, "step": 4}',
        '{"format_version": 1, "step": 4, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        '{"format_version": 1, "step": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:30],
)
def test_a_run_json_of_another_shape_is_damaged(text, tmp_path):
    path = save_small(tmp_path)
    (path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match="run.json is damaged"):
        read_run(tmp_path, NEW)


def test_a_changed_value_in_run_json_is_noticed_and_another_order_or_indent_is_not(
    tmp_path,
):
    path = save_small(tmp_path)
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(json.dumps(dict(sorted(json.loads(text).items()))))
    assert read_run(tmp_path, NEW) == json.loads(text)
    (path / "run.json").write_text(text.replace("0.001", "0.01"))
    with pytest.raises(
        CheckpointError,
        match=r"iter_0000004/run.json is damaged, or was changed .* checksum",
    ):
        read_run(tmp_path, NEW)


def test_values_that_a_loader_needs_are_asked_for_by_name():
    require({"a": {"b": 0, "c": {}}}, "runs/a", "a.b", "a.c")
    for name in ("a.d", "e", "a.b.c"):
        with pytest.raises(
            CheckpointError, match=f"run.json of runs/a has no '{name}'"
        ):
            require({"a": {"b": 0}}, "runs/a", name)


def test_a_save_that_could_not_be_loaded_is_refused_and_the_one_before_stays(tmp_path):
    save_small(tmp_path)
    with pytest.raises(
        CheckpointError, match="could not be read again: progress.step is 3 at step 6"
    ):
        save(
            tmp_path,
            6,
            some_pieces(6),
            coordinates={},
            world=solo(),
            run={"progress": {"step": 3, "samples": 9}},
        )
    assert latest(tmp_path) == NEW


IDENTITY = {
    "model": {"num_layers": 2},
    "tokenizer": {"fingerprint": "a"},
    "data": {"seed": 1},
}
DESCRIPTION = {"identity": IDENTITY, "config": {"optimizer": {"optimizer": "adam"}}}


@pytest.mark.parametrize(
    "missing",
    [
        "identity",
        "config",
        "progress",
        "optimizer",
        "identity.data",
        "config.optimizer",
    ],
)
def test_a_training_run_names_what_the_run_json_of_a_checkpoint_lacks(
    missing, tmp_path
):
    from megatron_ds.config.options.training import CheckpointConfig
    from megatron_ds.training.run_checkpoint import check_same_run

    saved = json.loads(
        json.dumps(
            DESCRIPTION | {name: RUN[name] for name in ("progress", "optimizer")}
        )
    )
    check_same_run(saved, DESCRIPTION, CheckpointConfig(load=str(tmp_path)))
    section, _, name = missing.partition(".")
    (saved[section] if name else saved).pop(name or section)
    with pytest.raises(CheckpointError, match=f"has no '{missing}"):
        check_same_run(saved, DESCRIPTION, CheckpointConfig(load=str(tmp_path)))


def test_a_training_run_refuses_the_checkpoint_of_an_engine(tmp_path):
    from megatron_ds.config.options.training import CheckpointConfig
    from megatron_ds.training.run_checkpoint import check_same_run

    with pytest.raises(
        CheckpointError, match="saved by an engine .* engine.load_checkpoint"
    ):
        check_same_run(
            {"engine": {"parameters": 3}, **RUN},
            DESCRIPTION,
            CheckpointConfig(load=str(tmp_path)),
        )


@pytest.mark.parametrize(
    "feature",
    [
        dict(qk_layernorm=True),
        dict(add_qkv_bias=True),
        dict(rotary_interleaved=True),
        dict(rotary_seq_len_interpolation_factor=2.0),
        dict(use_rope_scaling=True),
        dict(apply_layernorm_1p=True),
        dict(yarn_beta_fast=16.0),
        dict(use_rope_scaling=True, original_max_position_embeddings=2),
        dict(use_parallel_residual=True),
    ],
    ids=str,
)
def test_features_of_the_model_are_its_identity_and_others_need_not_be_known(feature):
    sizes = dict(
        num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=9
    )
    plain, other = (
        model_identity(ModelConfig(**sizes, **more)) for more in ({}, feature)
    )
    assert plain == {
        name: value for name, value in other.items() if name not in feature
    }
    assert (
        other.keys() - plain.keys() == feature.keys()
    )  # earlier versions saved none of them


SIZES = dict(
    num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=9
)
ROPE = dict(position_embedding_type="rope")
YARN = dict(
    position_embedding_type="yarn",
    original_max_position_embeddings=4,
    max_position_embeddings=32,
)


def run_of(**options):
    """run.json of a model, as it is read."""
    model = model_identity(ModelConfig(**SIZES | options))
    run = DESCRIPTION | {
        "identity": IDENTITY | {"model": model},
        "progress": RUN["progress"],
        "optimizer": RUN["optimizer"],
    }
    return json.loads(json.dumps(run))


@pytest.mark.parametrize(
    "before, after",
    [
        (ROPE, YARN),
        (YARN, ROPE),
        (ROPE, ROPE | dict(max_position_embeddings=32)),
        (
            ROPE,
            ROPE
            | dict(max_position_embeddings=32, rotary_seq_len_interpolation_factor=8.0),
        ),
        (ROPE, ROPE | dict(max_position_embeddings=32, rotary_base=1e6)),
        (
            ROPE,
            ROPE
            | dict(
                max_position_embeddings=32,
                rotary_ntk_factor=1.0,
                original_max_position_embeddings=4,
            ),
        ),
        (YARN, YARN | dict(max_position_embeddings=64)),
        *(
            (
                dict(position_embedding_type=kind),
                dict(position_embedding_type=kind, max_position_embeddings=32),
            )
            for kind in ("alibi", "none")
        ),
    ],
    ids=str,
)
def test_a_model_is_lengthened_with_finetune_alone(before, after, tmp_path):
    from megatron_ds.config.options.training import CheckpointConfig
    from megatron_ds.training.run_checkpoint import check_same_run

    wanted = CheckpointConfig(load=str(tmp_path))
    check_same_run(run_of(**before), run_of(**after), replace(wanted, finetune=True))
    with pytest.raises(
        CheckpointError,
        match="Add --finetune to train its weights with these positions",
    ):
        check_same_run(run_of(**before), run_of(**after), wanted)
    with pytest.raises(
        CheckpointError, match="qk_layernorm"
    ) as error:  # and nothing else changes
        check_same_run(
            run_of(**before),
            run_of(**after, qk_layernorm=True),
            replace(wanted, finetune=True),
        )
    assert "positions" not in str(error.value).replace("these positions", "")


@pytest.mark.parametrize(
    "after, says",
    [
        (
            dict(max_position_embeddings=32),
            "learned positions has 4 rows, .*--max-position-embeddings 4",
        ),
        (YARN, "position_embedding_type: checkpoint 'learned_absolute'"),
    ],
)
def test_learned_positions_are_not_lengthened(after, says, tmp_path):
    from megatron_ds.config.options.training import CheckpointConfig
    from megatron_ds.training.run_checkpoint import check_same_run

    for finetune in (True, False):
        with pytest.raises(CheckpointError, match=says):
            check_same_run(
                run_of(),
                run_of(**after),
                CheckpointConfig(load=str(tmp_path), finetune=finetune),
            )
