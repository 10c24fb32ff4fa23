"""The table of a FLOPs profile, an autotuner's numbers, CSV files, and the JSON blocks that ask for them."""

import pytest
import torch

from megatron_ds.compat.config.deepspeed_json import reading_of
from megatron_ds.config import parse
from megatron_ds.config.rules.training import TRAINING_RULES
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.curves.csv_monitor import CsvMonitor
from megatron_ds.extensions.profiler.flops_profile import layer_lines, phase_lines
from megatron_ds.extensions.profiler.layer_table import LayerRow, layer_rows
from megatron_ds.extensions.profiler.tuning import tuned_numbers
from megatron_ds.models import MODELS
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.planning.flops import layers_of, model_flops
from megatron_ds.training.observe.records import EvalRecord
from megatron_ds.training.observe.sink import Tolerant
from tests.training.test_train_log import changed

pytestmark = pytest.mark.plan

GPT = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 61 "
    "--make-vocab-size-divisible-by 1 --mock-data --micro-batch-size 1 --lr 1 --train-iters 9"
).split()
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2".split()


def config_of(*flags):
    return parse([*GPT, *flags], 1, rules=TRAINING_RULES)


@pytest.mark.parametrize(
    "flags", [[], LLAMA, EXPERTS], ids=["tied", "llama", "experts"]
)
def test_rows_add_up_to_the_model(flags):
    config = config_of(*flags)
    context = ParallelContext(device=torch.device("meta"))
    built = [layer.make() for layer in MODELS["gpt"](config.model, context)]
    parameters = sum(
        p.numel() for m in built for p in m.parameters() if not p.spec.tied_copy
    )
    for each in (True, False):
        rows = layer_rows(config, 6, 12, each=each)
        assert sum(row.parameters for row in rows) == parameters
        assert 3 * sum(row.forward for row in rows) == pytest.approx(
            model_flops(layers_of(config.model), 6, 12, 61)
        )
        assert sum(row.count for row in rows) == len(built)
    assert len(layer_rows(config, 6, 12, each=True)) == len(built)


def test_a_block_has_its_closed_form_and_blocks_that_drop_tokens_a_row_of_their_own():
    flags = "--random-ltd --random-ltd-min-tokens 8 --random-ltd-tokens-per-step 8 --random-ltd-steps 2"
    h, s, rows = 32, 16, layer_rows(config_of(*flags.split()), 2, 16, kept=8)
    block = lambda s: 2 * (24 * s * h * h + 2 * s * s * h)  # causal: half of 4 s² h
    forwards = [row.forward for row in rows if "block" in row.name]
    assert forwards == pytest.approx([2 * block(s), 2 * block(8)])
    assert [(row.name, row.count) for row in rows if "drops" in row.name] == [
        (rows[2].name, 2)
    ]
    assert rows[1].parameters == 2 * (12 * h * h + 13 * h)


@pytest.mark.parametrize(
    "flags, again",
    [
        ([], 0),
        (
            ["--recompute-granularity", "full"],
            4 * 3 * 2 * (24 * 16 * 32**2 + 2 * 16**2 * 32) / 2,
        ),
        (["--recompute-granularity", "selective"], 4 * 3 * 2 * 2 * 16**2 * 32 / 2),
    ],
)
def test_recomputation_is_the_forward_of_what_is_recomputed(flags, again):
    assert sum(
        row.again for row in layer_rows(config_of(*flags), 3, 16)
    ) == pytest.approx(again)


def test_some_blocks_of_each_stage_have_no_number():
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 1".split()
    rows = layer_rows(config_of(*flags), 3, 16)
    assert [row.again for row in rows if "block" in row.name] == [None]
    assert "not counted" in "\n".join(phase_lines(rows, {}, 1.0, None, 1))


ROWS = [
    LayerRow("embedding", 1, 1000, 0.0, 0.0),
    LayerRow("transformer block", 3, 3000, 6e12, 6e12),
]


def test_rates_are_the_flops_of_all_ranks_by_the_time_of_all_ranks():
    times = {
        "forward-compute": {0: 1.0, 1: 2.0},
        "backward-compute": {0: 2.0, 1: 4.0},
        "optimizer": {0: 0.5, 1: 0.25},
    }
    lines = {
        line.split()[0]: line.split()[1:]
        for line in phase_lines(ROWS, times, 9.0, 2e12, 2)
    }
    assert lines["forward"] == ["2000.00", "ms", "1000.00", "ms", "2", "T"]
    assert lines["backward"] == ["4000.00", "ms", "2000.00", "ms", "2", "T"]
    assert lines["optimizer"] == ["500.00", "ms", "250.00", "ms"]
    assert lines["step"] == ["9000.00", "ms", "1", "T"]  # 3 × 6e12 / 9 s / 2 ranks
    assert "50.0%" in lines["model"]
    assert "1.33" in lines["recomputation:"]  # 4 × 6e12 / 9 / 2
    table = [line.split() for line in layer_lines(ROWS)]
    assert table[2][2:] == ["3", "3", "k", "75.0%", "6", "T", "100.0%"] and table[-1][
        :2
    ] == ["all", "4"]


def test_an_autotuner_reads_milliseconds_samples_and_flops_of_a_rank():
    assert tuned_numbers([(0.5, 4e12), (1.5, 4e12)], 12, 2) == {
        "latency": 1000.0,
        "throughput": 12.0,
        "FLOPS_per_gpu": 2e12,
    }


# ------------------------------------------------------------------ CSV files
def test_csv_files_have_deepspeeds_layout_and_one_header(tmp_path):
    for first in (1, 3):  # a run and its resume
        sink = CsvMonitor(tmp_path)
        for step in (first, first + 1):
            sink.write(
                changed(
                    step=step,
                    samples=step * 8,
                    loss=1.0 / step,
                    learning_rate=1e-4 * step,
                    times={
                        "forward-compute": {0: 0.25, 1: 0.5},
                        "optimizer": {1: 0.125},
                    },
                )
            )
    sink.write(
        EvalRecord(step=4, samples=32, split="validation", loss=2.0, eval_seconds=1.0)
    )
    read = lambda name: (tmp_path / f"Train_Samples_{name}.csv").read_text()
    assert (
        read("lr")
        == "step,lr\n8,0.0001\n16,0.0002\n24,0.00030000000000000003\n32,0.0004\n"
    )
    assert read("train_loss").splitlines()[:3] == ["step,train_loss", "8,1.0", "16,0.5"]
    assert read("eval_loss") == "step,eval_loss\n32,2.0\n"
    assert read("elapsed_time_ms_forward").splitlines()[1] == "8,500.0"
    assert read("loss_scale").startswith("step,loss_scale\n8,65536.0\n") and read(
        "grad_norm"
    )


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    Tolerant(CsvMonitor(tmp_path / "file" / "csv")).write(changed())
    assert "Training continues" in caplog.text


# ------------------------------------------------------------------ JSON
def settings(block) -> dict:
    reading = reading_of("ds.json", block)
    assert not reading.problems, reading.problems
    return {setting.path: setting.value for setting in reading.settings}


def test_the_blocks_become_options():
    assert settings(
        {
            "flops_profiler": {
                "enabled": True,
                "profile_step": 7,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": False,
                "output_file": "x.txt",
                "recompute_fwd_factor": 0.0,
            }
        }
    ) == {
        "profiler.flops_profiler": True,
        "profiler.flops_profiler_step": 7,
        "profiler.flops_profiler_detailed": False,
        "profiler.flops_profiler_output_file": "x.txt",
    }
    assert settings(
        {"csv_monitor": {"enabled": True, "output_path": "a", "job_name": "b"}}
    ) == {"logging.csv_monitor_dir": "a/b"}
    assert settings({"csv_monitor": {"enabled": True, "output_path": ""}}) == {
        "logging.csv_monitor_dir": "DeepSpeedJobName"
    }
    assert settings(
        {
            "autotuning": {
                "enabled": True,
                "fast": True,
                "arg_mappings": {"a": "--b"},
                "end_profile_step": 9,
            }
        }
    ) == {"profiler.autotuning": True, "profiler.autotuning_end_step": 9}
    assert settings({"sequence_parallel_size": 2}) == {
        "parallel.context_parallel_size": 2,
        "parallel.cp_comm_type": ("a2a",),
    }
    assert settings({"sequence_parallel_size": 1}) == {
        "parallel.context_parallel_size": 1
    }
    assert settings(
        {"tensor_parallel": {"autotp_size": 4, "tp_overlap_comm": False}}
    ) == {"parallel.tensor_model_parallel_size": 4}


def test_disabled_blocks_ask_for_nothing():
    found = settings(
        {
            "flops_profiler": {"enabled": False, "profile_step": 7},
            "csv_monitor": {"enabled": False, "output_path": "a"},
            "autotuning": {"enabled": False, "end_profile_step": 9},
            "tensor_parallel": {"autotp_size": 0},
        }
    )
    assert found == {
        "profiler.flops_profiler": False,
        "profiler.autotuning": False,
        "parallel.tensor_model_parallel_size": 1,
    }


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--flops-profiler-step", "3"], "without --flops-profiler"),
        (["--autotuning-metric-path", "x"], "without --autotuning"),
        (["--autotuning", "--autotuning-start-step", "8"], "no step is measured"),
    ],
)
def test_options_without_effect_are_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        config_of(*flags)


def test_what_an_autotuner_would_learn_is_a_note():
    block = {"enabled": True, "model_info": {"profile": True}}
    reading = reading_of("ds.json", {"autotuning": block})
    assert not reading.problems
    assert "ds.json autotuning.model_info" in reading.without_effect
