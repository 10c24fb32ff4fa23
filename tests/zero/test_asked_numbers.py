"""Numbers that options ask for: norms of weights and state, zeros of the gradient, times; and what a run
takes from a checkpoint. Each is compared with a computation of its own."""

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ds.zero.optimizer import ZeroOptimizer
from tests.harness.pretraining import (
    MOCK,
    records,
    run_file,
    run_pretrain,
    saved_state,
    train,
)

pytestmark = pytest.mark.processes

ASKED = (
    "--log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard "
    "--log-memory-to-tensorboard --log-world-size-to-tensorboard "
    "--log-optimizer-states-to-tensorboard --untie-embeddings-and-output-weights"
).split()


@contextlib.contextmanager
def counting_zeros_of_leaves(rank):
    """Prints the zeros of the gradients that the optimizers read, before each update."""
    update = ZeroOptimizer.update

    def counting(self, measured, *args):
        grads = [
            leaf.unpadded(leaf.tensor.grad) for s in self.trained for leaf in s.leaves
        ]
        print("zeros", int(sum((grad == 0).sum() for grad in grads)))
        return update(self, measured, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroOptimizer, "update", counting)
        yield


def scalars(folder: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [point.value for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (ended,) = train(
        1,
        [
            *MOCK,
            *ASKED,
            "--train-iters",
            "3",
            "--save",
            folder,
            "--tensorboard-dir",
            folder / "tb",
            "--timing-log-level",
            "2",
        ],
        spoil=counting_zeros_of_leaves,
    )
    return folder, ended.out


def test_params_norm_and_state_norms_are_those_of_the_checkpoint(one_rank):
    folder, out = one_rank
    state, tags = saved_state(folder, 3), scalars(folder / "tb")
    kinds = {"weight": "weight/", "momentum": "exp_avg/", "variance": "exp_avg_sq/"}
    whole = {
        kind: [name for name in state if name.startswith(start)]
        for kind, start in kinds.items()
    }
    flat = {
        kind: torch.cat([state[name].double().flatten() for name in found])
        for kind, found in whole.items()
    }
    flat["variance_sqrt"] = flat["variance"].sqrt()
    assert len(whole["momentum"]) == len(whole["weight"]) == len(whole["variance"]) > 10
    assert records(folder)[-1]["params_norm"] == pytest.approx(
        flat["weight"].norm().item(), rel=1e-6
    )
    assert tags["params-norm"][-1] == pytest.approx(
        flat["weight"].norm().item(), rel=1e-6
    )
    for kind, values in flat.items():
        for norm, expected in (
            ("l2", values.norm()),
            ("l1", values.abs().sum()),
            ("abs_max", values.abs().max()),
        ):
            found = tags[f"optimizer/{kind}_{norm}"][-1]
            assert found == pytest.approx(expected.item(), rel=1e-5), (kind, norm)


def test_zeros_are_those_of_the_gradients_and_appear_in_line_and_file(one_rank):
    folder, out = one_rank
    counted = [
        int(line.split()[1]) for line in out.splitlines() if line.startswith("zeros")
    ]
    logged = [record["num_zeros"] for record in records(folder)]
    assert (
        logged == counted and min(counted) > 32
    )  # rows of tokens that the batch does not have
    assert scalars(folder / "tb")["num-zeros"] == counted
    assert f"| num zeros: {counted[-1]} | params norm: " in out


def test_times_of_phases_are_parts_of_the_step(one_rank):
    folder, out = one_rank
    tags, last = scalars(folder / "tb"), records(folder)[-1]
    assert (
        tags["world-size"] == [1, 1, 1] and tags["mem-max-allocated-bytes"][-1] > 2**20
    )
    parts = last["forward_compute_seconds"] + last["backward_compute_seconds"]
    assert 0 < parts <= last["forward_backward_seconds"] * 1.001 < last["step_seconds"]
    assert (
        last["optimizer_seconds"] < last["step_seconds"]
        and "(min, max) time across ranks (ms):" in out
    )
    assert tags["forward-compute-time"][-1] == pytest.approx(
        last["forward_compute_seconds"]
    )


@pytest.mark.parametrize(
    "layout",
    [
        ["--zero-stage", "2", "--tensor-model-parallel-size", "2"],
        ["--zero-stage", "3", "--pipeline-model-parallel-size", "2"],
    ],
)
def test_the_numbers_do_not_depend_on_the_layout(one_rank, layout, tmp_path):
    words = [
        *MOCK,
        *ASKED,
        "--train-iters",
        "3",
        "--save",
        tmp_path,
        *(
            "--timing-log-level 1 --timing-log-option all "
            "--check-weight-hash-across-dp-replicas-interval 2"
        ).split(),
    ]
    ended = train(4, [*words, *layout])
    here, there = records(tmp_path)[-1], records(one_rank[0])[-1]
    assert here["params_norm"] == pytest.approx(there["params_norm"], rel=1e-5)
    assert here["num_zeros"] == pytest.approx(
        there["num_zeros"], abs=64
    )  # sums that round to zero
    assert "     rank  3: " in ended[0].out and "forward_compute_seconds" not in here


@contextlib.contextmanager
def flipping_a_weight(rank):
    """Rank 1 changes a weight after its second update, as faulty memory would."""
    update, done = ZeroOptimizer.update, []

    def flipped(self, *args):
        result = update(self, *args)
        done.append(1)
        if rank == 1 and len(done) == 2:
            self.sets[0].parameters[0].data.view(-1)[3] += 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroOptimizer, "update", flipped)
        yield


def test_a_weight_that_differs_between_replicas_ends_the_run():
    ended = run_pretrain(
        2,
        [*MOCK, "--check-weight-hash-across-dp-replicas-interval", "2"],
        spoil=flipping_a_weight,
    )
    assert [end.code for end in ended] == [
        2,
        2,
    ] and "of rank 1 differs from that of rank 0" in ended[0].err


def test_only_checkpoints_of_the_interval_are_kept_and_a_run_takes_options_from_one(
    tmp_path,
):
    train(
        1,
        [
            *MOCK,
            "--train-iters",
            "4",
            "--save",
            tmp_path / "a",
            *"--save-interval 1 --save-retain-interval 2".split(),
        ],
    )
    kept = sorted(path.name for path in (tmp_path / "a").iterdir() if path.is_dir())
    assert [name for name in kept if name.startswith("iter_")] == [
        "iter_0000002",
        "iter_0000004",
    ]
    few = [
        *(
            "--mock-data --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 0.5 "
            "--train-iters 6 --eval-iters 0 --log-interval 1"
        ).split(),
        "--load",
        tmp_path / "a",
        "--use-checkpoint-args",
        "--use-checkpoint-opt_param-scheduler",
    ]
    (ended,) = train(1, [*few, "--save", tmp_path / "b"])
    assert "  the checkpoint  num_layers 2" in ended.out
    steps = records(tmp_path / "b")
    # cosine from 1e-3 to 1e-4 that ended with the first run, at step 4
    assert [record["step"] for record in steps] == [5, 6]
    assert all(math.isclose(record["learning_rate"], 1e-4) for record in steps)
    saved = run_file(tmp_path / "b", 6)["config"]
    assert (
        saved["model"]["hidden_size"] == 32
        and saved["optimizer"]["lr_decay_iters"] == 4
    )
    (ended,) = run_pretrain(1, [*few, "--hidden-size", "64"])
    assert ended.code == 2 and "hidden_size" in ended.err


@contextlib.contextmanager
def saying_what_is_deterministic(rank):
    """Prints, at each update, whether torch is restricted to deterministic algorithms."""
    update = ZeroOptimizer.update

    def saying(self, *args):
        print("deterministic:", torch.are_deterministic_algorithms_enabled())
        return update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroOptimizer, "update", saying)
        yield
        print("afterwards:", torch.are_deterministic_algorithms_enabled())


def test_deterministic_mode_restricts_torch_during_the_run():
    words = [*MOCK, "--train-iters", "3"]
    (ended,) = train(
        1, [*words, "--deterministic-mode"], spoil=saying_what_is_deterministic
    )
    assert ended.out.count("deterministic: True") == 3
    (ended,) = train(1, words, spoil=saying_what_is_deterministic)
    assert ended.out.count("deterministic: False") == 3


def test_a_profile_is_of_its_step_and_an_autotuners_run_ends_after_its_own(tmp_path):
    ended = train(
        2,
        [
            *MOCK,
            *(
                "--train-iters 30 --pipeline-model-parallel-size 2 --flops-profiler "
                "--flops-profiler-step 2"
            ).split(),
            "--flops-profiler-output-file",
            tmp_path / "a" / "profile",
            "--autotuning",
            "--autotuning-metric-path",
            tmp_path / "metric.json",
            "--csv-monitor-dir",
            tmp_path / "csv",
            "--timing-log-level",
            "1",
        ],
    )
    lines = (tmp_path / "a" / "profile").read_text().splitlines()
    assert lines[0] == "FLOPs profile of step 3: 4 samples of 16 tokens on 2 ranks"
    words = {line.split()[0]: line.split() for line in lines[1:]}
    forward = 4 * (2 * (24 * 16 * 32**2 + 2 * 16**2 * 32) + 2 * 16 * 32 * 62)
    # 3 digits are printed
    assert (
        float(words["all"][5]) == pytest.approx(forward / 1e6, rel=5e-3)
        and words["all"][6] == "M"
    )
    assert float(words["decoder.layers.0"][2]) == pytest.approx(
        (12 * 32**2 + 13 * 32) / 1e3, rel=5e-3
    )
    assert (
        0
        < float(words["forward"][3])
        <= float(words["forward"][1])
        < float(words["step"][1])
    )
    metric = json.loads((tmp_path / "metric.json").read_text())
    assert metric["throughput"] == pytest.approx(4 / metric["latency"] * 1e3)
    assert metric["FLOPS_per_gpu"] == pytest.approx(
        3 * forward / metric["latency"] * 1e3 / 2
    )
    assert "autotuning has measured its steps; 6 steps" in ended[0].out
    rates = (tmp_path / "csv" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rates[0] == "step,lr"
    assert [row.split(",")[0] for row in rates[1:]] == [
        "4",
        "8",
        "12",
        "16",
        "20",
        "24",
    ]
    assert ended[0].out.count("forward-backward ") == 6
