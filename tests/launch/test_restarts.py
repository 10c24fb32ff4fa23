"""Whether, when and where a job is started again: pure rules, then starts of programs that fail."""

import json
from dataclasses import replace

import pytest

from megatron_ds.extensions.launch.failures import Failure
from megatron_ds.extensions.launch.layout_check import LayoutCheck
from megatron_ds.extensions.launch.restarts import (
    Attempts,
    Ended,
    Policy,
    fitting,
    pause_seconds,
    reason_to_end,
    without_failing,
)
from tests.launch.starts import PROGRAM, Launcher, all_end, launch, printed

SLOTS = {"n1": (0, 1), "n2": (0, 1), "n3": (0,)}
TRAINING = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-3"
DATA = "--mock-data --vocab-size 61 --train-iters 2"


def starts(*steps: int) -> list[Ended]:
    return [Ended(1, "n1", step) for step in steps]


@pytest.mark.plan
class TestRules:
    def test_restarts_are_counted(self):
        policy = Policy(2, 1)
        assert reason_to_end(starts(1, 2), policy) == ""
        assert "--max-restarts 2 is reached" in reason_to_end(starts(1, 2, 3), policy)

    def test_the_cause_of_a_failure_is_the_last_line_of_its_error(self):
        text = "Traceback\n  x = (\nSyntaxError: '(' was never closed\n\n"
        failure = Failure(0, 0, "n1", 1, 5.0, text)
        assert failure.cause == "SyntaxError: '(' was never closed"
        assert replace(failure, code=-9).cause == ""

    def test_an_error_of_the_user_is_final(self):
        ended = [Ended(2, "n1", 3, is_final=True)]
        assert "a restart would end alike" in reason_to_end(ended, Policy(9, 1))

    @pytest.mark.parametrize(
        "steps, is_stuck",
        [
            ((7, 7, 7), False),  # three starts, of which the first got there
            ((7, 7, 7, 7), True),
            ((7, 5, -1, 6), True),
            ((7, 5, 8, 6), False),
            ((-1, -1, -1, -1), False),  # a program whose steps are not known
            ((0, 0, 0, 0), True),
        ],
    )
    def test_a_run_without_progress_ends(self, steps, is_stuck):
        assert (
            "no progress" in reason_to_end(starts(*steps), Policy(99, 1))
        ) == is_stuck

    @pytest.mark.parametrize(
        "ended, is_stuck",
        [
            ([(1, "SyntaxError: invalid syntax")] * 3, False),
            ([(1, "SyntaxError: invalid syntax")] * 4, True),
            ([(1, f"error in step {step}") for step in range(4)], False),
            ([(1, "killed: a")] * 3 + [(9, "killed: a")], False),
            ([(137, "")] * 4, False),  # by a signal
        ],
    )
    def test_a_program_that_reports_no_step_and_ends_alike_is_left(
        self, ended, is_stuck
    ):
        starts = [Ended(code, "n1", -1, cause=cause) for code, cause in ended]
        assert ("no progress" in reason_to_end(starts, Policy(99, 1))) == is_stuck

    def test_starts_that_reported_steps_are_compared_by_these(self):
        starts = [Ended(1, "n1", step, cause="x") for step in (5, 6, 7, 8)]
        assert not reason_to_end(starts, Policy(99, 1))

    def test_pauses_grow_without_progress(self):
        assert pause_seconds(starts(3)) == 1
        assert pause_seconds(starts(3, 3)) == 2
        assert pause_seconds(starts(3, 3, 3)) == 4
        assert pause_seconds(starts(3, 3, 4)) == 1
        assert pause_seconds(starts(*[3] * 40)) == 60

    def test_a_host_that_fails_often_is_left_out_down_to_the_fewest(self):
        hosts = ("n2", "n1", "n2", "n1", "n2", "n2", "n1")
        ended = [Ended(1, host) for host in hosts]
        assert list(without_failing(SLOTS, ended[:4], Policy(9, 1))) == list(SLOTS)
        assert list(without_failing(SLOTS, ended, Policy(9, 2))) == ["n1", "n3"]
        assert list(without_failing(SLOTS, ended, Policy(9, 1))) == ["n3"]
        assert list(without_failing(SLOTS, ended, Policy(9, 3))) == list(SLOTS)

    def test_the_most_hosts_that_fit_are_used(self):
        even = lambda world: f"{world} ranks are odd" if world % 2 else ""
        assert fitting(SLOTS, Policy(9, 1), even) == (
            {"n1": (0, 1), "n2": (0, 1)},
            "5 ranks are odd",
        )
        assert fitting(SLOTS, Policy(9, 3), even) == ({}, "5 ranks are odd")


@pytest.mark.plan
def test_hosts_go_and_come_back():
    """n2 is lost in the first start and back for the third; n3 fails three times."""
    failures = [Ended(1, "n3", step) for step in (6, 7, 8)]
    ended = iter([Ended(255, "n2", 3), *failures, Ended(0)])
    there = iter([["n1", "n3"], *[["n1", "n2", "n3"]] * 3])
    used = []
    notes = []
    made = Attempts(
        start=lambda slots, start: used.append((start, list(slots))) or next(ended),
        answering=lambda slots: {host: slots[host] for host in next(there)},
        problem=lambda world: "",
        pause=lambda seconds: True,
        note=notes.append,
    )
    assert made.run(SLOTS, Policy(9, 1)) == 0
    assert used == [
        (0, ["n1", "n2", "n3"]),
        (1, ["n1", "n3"]),
        (2, ["n1", "n2", "n3"]),
        (3, ["n1", "n2", "n3"]),
        (4, ["n1", "n2"]),
    ]
    text = "\n".join(notes)
    assert "n2 does not answer" in text and "n3 failed 3 times" in text


@pytest.mark.plan
class TestLayout:
    def words(self, *more: str) -> list[str]:
        return ["pretrain_gpt.py", *TRAINING.split(), *DATA.split(), *more]

    def test_ranks_that_do_not_fit_are_refused_with_the_reason(self):
        words = self.words(
            "--tensor-model-parallel-size", "2", "--global-batch-size", "8"
        )
        check = LayoutCheck(words, 8)
        assert check.problem(4) == ""
        assert "With 3 ranks: " in check.problem(3) and "tensor" in check.problem(3)
        assert "global" in check.problem(6) and "8" in check.problem(6)

    def test_another_program_is_not_checked(self):
        assert LayoutCheck(["train.py", "--unknown"], 4).problem(3) == ""
        assert LayoutCheck(self.words("--unknown"), 4).problem(3) == ""

    def test_the_elasticity_of_a_config_is_checked(self, tmp_path):
        path = tmp_path / "ds.json"
        section = {
            "enabled": True,
            "max_train_batch_size": 12,
            "micro_batch_sizes": [2],
        }
        path.write_text(json.dumps({"elasticity": section | {"version": 0.1}}))
        for words in (
            ["--deepspeed_config", str(path)],
            [f"--deepspeed_config={path}"],
        ):
            check = LayoutCheck(["train.py", *words], 6)
            assert check.problem(3) == ""
            assert "With 5 ranks: world size 5 is not valid" in check.problem(5)

    def test_a_command_is_checked_as_the_script(self):
        words = ["megatron_ds", "train", *self.words("--global-batch-size", "4")[1:]]
        assert "global" in LayoutCheck(words, 4).problem(3)


# ------------------------------------------------------------------ with processes
def plan(**actions: str) -> str:
    return json.dumps({name.removeprefix("r"): how for name, how in actions.items()})


@pytest.mark.quick
@pytest.mark.processes
def test_a_program_is_started_again_until_it_ends_well(tmp_path):
    words = ["--num_gpus", "2", "--max-restarts", "3", PROGRAM]
    code, text = launch(words, tmp_path, PLAN=plan(r1="kill in start 0"))
    assert code == 0, text
    assert text.count("rank 1 on localhost (local rank 1) failed first, SIGKILL") == 1
    assert "restart 1 of at most 3" in text and "restart 2" not in text
    starts = [found["MEGATRON_DS_RESTARTS"] for found in printed(text)]
    assert sorted(starts) == ["0", "1", "1"]
    assert len({found["MEGATRON_DS_RUN"] for found in printed(text)}) == 1
    assert all_end(tmp_path)


@pytest.mark.processes
def test_why_there_is_no_restart_is_printed(tmp_path):
    words = ["--num_gpus", "1", "--max-restarts", "1", PROGRAM]
    code, text = launch(words, tmp_path, PLAN=plan(r0="exit 2"))
    assert code == 2
    assert "no restart: exit code 2: a restart would end alike" in text
    assert text.count("failed first") == 1


@pytest.mark.processes
@pytest.mark.all
def test_a_signal_ends_the_lives(tmp_path):
    words = ["--num_gpus", "1", "--max-restarts", "5", PROGRAM]
    started = Launcher(words, tmp_path, PLAN=plan(r0="fail on SIGTERM"))
    started.wait_for("rank 0 waits")
    started.process.terminate()
    assert started.end() == 3, started.text
    assert "restart 1" not in started.text


@pytest.mark.plan
def test_flags_that_contradict_each_other_are_refused(tmp_path):
    from megatron_ds.errors import ConfigError
    from megatron_ds.extensions.launch.command import main

    for words, reason in (
        (["--min-nodes", "2"], "--min-nodes 2 .* add --max-restarts"),
        (
            ["--min-nodes", "2", "--max-restarts", "1"],
            "--min-nodes 2, but the job has 1 hosts",
        ),
        (
            ["--no_ssh", "--node_rank", "0", "--max-restarts", "1"],
            "--max-restarts with",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            main(["--num_gpus", "1", *words, "train.py"])
