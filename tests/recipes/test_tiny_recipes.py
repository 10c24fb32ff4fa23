"""`recipes/check.py --run-tiny` trains a recipe shrunk; --skip-train; extra checkpoints; trigger files."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ds.compat.recipes.file import read_recipe
from megatron_ds.compat.recipes.tiny import shrunk
from megatron_ds.compat.recipes.tiny_run import losses_of
from megatron_ds.compat.recipes.verdict import assess, config_of
from megatron_ds.config.parse import parse
from megatron_ds.errors import ConfigError
from megatron_ds.training.observe.metrics_file import read_metrics
from megatron_ds.training.pretrain import KNOWN_NAMES, RULES
from tests.harness.pretraining import MOCK, STEPS, TINY, losses, train
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

LARGE = """
ARGS="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
  --num-query-groups 8 --group-query-attention --seq-length 4096 --max-position-embeddings 4096
  --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --bf16
  --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
  --micro-batch-size 4 --global-batch-size 1024 --train-iters 25000 --lr 3e-4 --min-lr 3e-5
  --lr-decay-style cosine --lr-warmup-iters 500 --lr-decay-iters 25000 --save ckpt --load ckpt
  --tokenizer-type Llama2Tokenizer --tokenizer-model t.model --data-path corpus --split 949,50,1"
srun bash -c 'torchrun --nproc_per_node 8 --nnodes 4 --node_rank $SLURM_NODEID pretrain_gpt.py $ARGS'
"""
EXPERTS = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --num-experts 64 --moe-router-topk 6 \\
  --expert-model-parallel-size 8 --moe-layer-freq '([0]*1+[1]*23)' --moe-ffn-hidden-size 512 \\
  --micro-batch-size 2 --global-batch-size 64 --train-samples 100000 --lr-warmup-samples 1000 --lr 1e-4 \\
  --lr-decay-style WSD --lr-wsd-decay-samples 5000 --optimizer adam --data-path corpus \\
  --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m --pipeline-layout 24
"""


@pytest.fixture
def starts_warm(monkeypatch):
    """What this process starts as `sys.executable` has imported torch already."""
    monkeypatch.setattr(sys, "executable", warm_python())


def parsed(text: str, ranks: int):
    folder = parsed.folder
    (folder / "x.yaml").write_text(text)
    return parse(
        ["--config", str(folder / "x.yaml")],
        ranks,
        known=KNOWN_NAMES,
        rules=RULES,
        env={},
    )


def tiny_of(folder: Path, recipe: str):
    parsed.folder = folder
    (folder / "run.sh").write_text(recipe)
    (training,) = read_recipe(folder / "run.sh", {})
    assessment = assess(training, KNOWN_NAMES, RULES)
    assert assessment.is_accepted, assessment.problems
    return shrunk(config_of(training, assessment.ranks), parsed, str(folder))


@pytest.mark.quick
def test_a_shrunk_recipe_keeps_its_kinds_of_layout_its_schedule_and_its_optimizer(
    tmp_path,
):
    tiny = tiny_of(tmp_path, LARGE)
    config, model = tiny.config, tiny.config.model
    assert tiny.ranks == 4 and not tiny.left_out
    assert (config.parallel.tensor_model_parallel_size, config.data_parallel_size) == (
        2,
        2,
    )
    assert (
        config.parallel.sequence_parallel
        and config.zero.stage == 1
        and config.optimizer.bf16
    )
    assert (
        model.num_layers,
        model.hidden_size,
        model.num_query_groups,
        model.activation,
    ) == (2, 64, 2, "swiglu")
    rate = config.optimizer
    assert (
        rate.lr,
        rate.min_lr,
        rate.lr_decay_style,
        rate.lr_warmup_iters,
        rate.lr_decay_iters,
    ) == (3e-4, 3e-5, "cosine", 1, 3)
    assert (
        config.data.mock_data
        and config.checkpoint.save is config.checkpoint.load is None
    )


def test_a_shrunk_recipe_counts_in_the_unit_of_its_spans(tmp_path):
    config = tiny_of(tmp_path, EXPERTS).config
    batch = config.train.global_batch_size
    assert config.train.train_samples == 3 * batch and config.train.train_iters is None
    assert (
        config.optimizer.lr_wsd_decay_samples
        == config.optimizer.lr_warmup_samples
        == batch
    )
    assert (config.model.num_experts, config.model.moe_router_topk) == ((4,), 2)
    assert config.parallel.expert_model_parallel_size == 2


def test_a_shrunk_recipe_keeps_whole_experts_on_tensor_parallel_ranks(tmp_path):
    """The ranks that hold one copy are enough where tensor-parallel ranks have different experts."""
    folded = EXPERTS.replace(
        "--expert-model-parallel-size 8",
        "--expert-model-parallel-size 8 --tensor-model-parallel-size 8 --sequence-parallel "
        "--expert-tensor-parallel-size 1",
    )
    assert "--expert-tensor" in folded
    parallel = tiny_of(tmp_path, folded).config.parallel
    assert parallel.tensor_model_parallel_size == 2 and parallel.sequence_parallel
    assert parallel.expert_tensor_parallel_size == 1
    assert parallel.expert_model_parallel_size == 2


@pytest.mark.parametrize("recipe, ranks", [(LARGE, 4), (EXPERTS, 2)])
def test_a_shrunk_recipe_trains_three_steps(tmp_path, recipe, ranks, starts_warm):
    tiny = tiny_of(tmp_path, recipe)
    assert tiny.ranks == ranks
    records = losses_of(tiny, tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(5 < record["loss"] < 6.5 for record in records)  # ln 250 = 5.52
    assert records[1]["learning_rate"] == pytest.approx(
        tiny.config.optimizer.lr
    )  # after the warm-up


def test_a_tiny_run_that_fails_shows_how_it_ended(tmp_path, starts_warm):
    tiny = tiny_of(tmp_path, EXPERTS)
    failing = replace(tiny, ranks=1, text=f"{tiny.text}\nno_such_section: 1\n")
    with pytest.raises(ConfigError, match="made 0 of 3 steps(.|\n)*no_such_section"):
        losses_of(failing, tmp_path)


def test_evaluation_alone_has_the_losses_of_the_run_that_trained_and_changes_no_file(
    tmp_path,
):
    evaluating = ["--eval-iters", "2", "--eval-interval", str(STEPS)]
    run = train(
        1,
        [
            *MOCK,
            *evaluating,
            "--save",
            str(tmp_path / "run"),
            "--metrics-jsonl",
            str(tmp_path / "m.jsonl"),
        ],
    )
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))
    alone = train(
        1,
        [
            *MOCK,
            *evaluating,
            "--load",
            str(tmp_path / "run"),
            "--save",
            str(tmp_path / "run"),
            "--skip-train",
            "--metrics-jsonl",
            str(tmp_path / "e.jsonl"),
        ],
    )
    kinds = {
        name: [record for record in read_metrics(tmp_path / name) if "loss" in record]
        for name in ("m.jsonl", "e.jsonl")
    }
    assert [record["kind"] for record in kinds["e.jsonl"]] == ["validation", "test"]
    trained = {record["kind"]: record["loss"] for record in kinds["m.jsonl"]}
    assert {record["kind"]: record["loss"] for record in kinds["e.jsonl"]} == {
        kind: trained[kind] for kind in ("validation", "test")
    }
    assert (
        sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))
        == before
    )
    assert (
        "training ended: evaluated only; 0 steps" in alone[0].out
        and "finished" in run[0].out
    )


def test_extra_checkpoints_are_saved_also_before_the_first_step(tmp_path):
    train(
        1,
        [
            *MOCK,
            "--save",
            str(tmp_path),
            *"--save-interval 4 --extra-save-iters 0 1 3".split(),
        ],
    )
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")) == [
        0,
        1,
        3,
        4,
        STEPS,
    ]


def test_a_file_that_asks_for_the_end_saves_and_ends_all_ranks(tmp_path):
    (tmp_path / "triggers").mkdir()
    (tmp_path / "triggers" / "exit").touch()
    ended = train(
        2,
        [
            *TINY,
            "--mock-data",
            "--train-iters",
            "100000",
            "--save",
            str(tmp_path / "run"),
            "--trigger-path",
            str(tmp_path / "triggers"),
        ],
    )
    assert "found " + str(tmp_path / "triggers" / "exit") in ended[0].out
    assert list(losses(tmp_path / "run")) == [1]


def test_a_file_that_asks_for_a_checkpoint_is_removed_and_the_run_goes_on(tmp_path):
    (tmp_path / "save").touch()
    train(2, [*MOCK, "--save", str(tmp_path / "run"), "--trigger-path", str(tmp_path)])
    assert not (tmp_path / "save").exists()
    assert sorted(int(path.name[5:]) for path in (tmp_path / "run").glob("iter_*")) == [
        1,
        STEPS,
    ]
