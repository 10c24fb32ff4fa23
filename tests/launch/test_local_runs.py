"""Ranks on this machine: arguments, signals, failures, and what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from megatron_ds.extensions.launch.job import Job, RankProgram
from megatron_ds.extensions.launch.program_check import reason_against
from tests.harness.limits import HUNG
from tests.launch.starts import (
    LEAST,
    PROGRAM,
    ROOT,
    Launcher,
    all_end,
    children_of,
    environment,
    launch,
    printed,
)
from tests.launch.test_job import ODD_WORDS

pytestmark = pytest.mark.processes


@pytest.fixture
def folder(tmp_path):
    """A folder in which no process works after the test."""
    yield tmp_path
    assert all_end(tmp_path)


def plan(**actions: str) -> str:
    return json.dumps(
        {name.removeprefix("r"): action for name, action in actions.items()}
    )


def test_words_and_variables_arrive_unchanged(folder):
    (folder / ".deepspeed_env").write_text("A_VARIABLE=$x 'y'\n")
    words = ["--num_gpus", "2", PROGRAM, *ODD_WORDS]
    code, text = launch(words, folder)
    assert code == 0, text
    assert [found["words"] for found in printed(text)] == [
        [f"--local_rank={rank}", *ODD_WORDS] for rank in range(2)
    ]
    assert {found["A_VARIABLE"] for found in printed(text)} == {"$x 'y'"}


@pytest.mark.quick
@pytest.mark.parametrize(
    "action, code, how",
    [
        ("fail", 1, "exit code 1"),
        ("exit 7", 7, "exit code 7"),
        ("kill", 137, "SIGKILL: the kernel does this where memory runs out"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named_last(folder, action, code, how):
    words = ["--num_gpus", "3", PROGRAM]
    started = Launcher(words, folder, PLAN=plan(r1=action, others="wait"))
    assert started.end() == code
    last = started.text[started.text.index("failed first") - 80 :]
    assert f"rank 1 on localhost (local rank 1) failed first, {how}" in last
    assert "rank 0 saved" in started.text and "rank 2 saved" in started.text
    assert started.text.rindex("saved") < started.text.index("failed first")
    if action == "fail":
        assert started.text.rstrip().endswith("RuntimeError: a mistake on rank 1")


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(folder):
    words = ["--num_gpus", "2", "--grace-seconds", str(LEAST), PROGRAM]
    code, text = launch(words, folder, PLAN=plan(r0="exit 7", r1="ignore"))
    assert code == 7
    assert "rank 0 on localhost (local rank 0) failed first" in text


def test_the_agents_signal_is_not_the_cause_of_an_error_recorded_before(folder):
    actions = plan(r0="record an error", r1="exit 7")
    code, text = launch(["--num_gpus", "2", PROGRAM], folder, PLAN=actions)
    assert code == 1
    last = text[text.index("rank 0 on localhost (local rank 0) failed first") :]
    assert "failed first, exit code 1\na recorded mistake" in last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_reaches_the_ranks_which_save(folder, number):
    started = Launcher(["--num_gpus", "2", PROGRAM], folder, PLAN=plan(others="wait"))
    started.wait_for("rank 0 waits", "rank 1 waits")
    started.signal(number)
    assert started.end() == 0, started.text
    for rank in range(2):
        assert f"rank {rank} saves after {number.name}" in started.text
        assert f"rank {rank} saved" in started.text


def test_a_second_ctrl_c_ends_ranks_at_once(folder):
    started = Launcher(["--num_gpus", "1", PROGRAM], folder, PLAN=plan(others="wait"))
    started.wait_for("rank 0 waits")
    started.signal(signal.SIGINT)
    started.wait_for("rank 0 saves")
    started.signal(signal.SIGINT)
    assert started.end() == 137
    assert "rank 0 saved" not in started.text


@pytest.mark.parametrize("whom", ["launcher", "agent"])
def test_nothing_is_left_behind_by_a_process_that_is_killed(tmp_path, whom):
    words = ["--num_gpus", "2", "--grace-seconds", str(LEAST), PROGRAM]
    started = Launcher(words, tmp_path, PLAN=plan(others="ignore"))
    started.wait_for("rank 0 waits", "rank 1 waits")
    launcher = started.process.pid
    [agent] = children_of(launcher)
    os.kill(launcher if whom == "launcher" else agent, signal.SIGKILL)
    assert all_end(tmp_path)
    assert started.end() in (-9, 137)


def test_a_process_that_a_rank_has_left_ends_with_the_job(folder):
    code, text = launch(
        ["--num_gpus", "1", PROGRAM], folder, PLAN=plan(r0="leave a child")
    )
    assert code == 0 and printed(text)
    assert all_end(folder, 600)  # it would go on for an hour


def test_each_rank_has_a_log_that_a_second_run_continues(folder):
    words = ["--num_gpus", "2", "--enable_each_rank_log", "logs", PROGRAM]
    for runs in (1, 2):
        code, text = launch(words, folder)
        assert code == 0, text
        for rank in range(2):
            lines = (folder / f"logs/rank{rank}.log").read_text()
            assert [found["rank"] for found in printed(lines)] == [rank] * runs


def test_a_failure_names_the_log(folder):
    words = ["--num_gpus", "1", "--log-dir", "logs", PROGRAM]
    code, text = launch(words, folder, PLAN=plan(r0="fail"))
    assert code == 1
    assert text.rstrip().endswith(f"its whole output: {folder}/logs/rank0.log")


@pytest.mark.parametrize(
    "words, what",
    [
        ("--no_python ./absent.sh", "the program ./absent.sh does not exist"),
        ("train/absent.py", "the script {folder}/train/absent.py does not exist"),
        ("--module absent.train", "Python finds no module absent"),
    ],
)
def test_a_program_that_does_not_exist_is_named_before_any_rank_starts(
    folder, words, what
):
    before = ["--num_gpus", "2", "--max-restarts", "3"]
    code, text = launch([*before, *words.split()], folder)
    assert code == 2
    reason = f"no rank can be started on localhost: {what.format(folder=folder)}"
    assert reason in text and "Traceback" not in text
    # Another start would end alike.
    assert "no restart: exit code 2" in text and text.count(reason) == 1


def test_programs_of_each_kind_are_found_where_ranks_find_them(tmp_path):
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "far/distant.py").touch()
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "far")}
    found = lambda first, python=sys.executable, is_module=False: reason_against(
        RankProgram((first,), python, is_module), tmp_path, variables
    )
    assert not found("run.sh") and not found("sh", "") and not found(sys.executable)
    assert "exists, but cannot be executed" in found("./run.sh", "")
    (tmp_path / "run.sh").chmod(0o755)
    assert not found("./run.sh", "") and "does not exist" in found("run.sh.py", "")
    for module in ("json.tool", "distant", "pkg.train", "__main__"):
        assert not found(module, is_module=True), module
    # An interpreter of its own may have other modules.
    assert found("absent", is_module=True)
    assert not found("absent", "/opt/python", is_module=True)


def test_a_module_and_a_program_of_another_language_are_started(folder):
    (folder / "hello.sh").write_text('#!/bin/sh\necho "shell $RANK $1 $2"\n')
    (folder / "hello.sh").chmod(0o755)
    (folder / "hello.py").write_text("import sys; print('module', sys.argv[1:])\n")
    code, text = launch(["--num_gpus", "1", "--no_python", "./hello.sh", "a"], folder)
    assert code == 0 and "shell 0 --local_rank=0 a" in text
    code, text = launch(["--num_gpus", "1", "--module", "hello", "a"], folder)
    assert code == 0 and "module ['--local_rank=0', 'a']" in text


def test_without_ssh_each_host_starts_its_own_ranks(folder):
    (folder / "hosts").write_text("n1 slots=1\nn2 slots=2\n")
    words = ["--hostfile", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", PROGRAM]
    ranks = []
    for node in range(2):
        code, text = launch(["--node_rank", str(node), *words], folder)
        assert code == 0, text
        ranks += [(found["rank"], found["LOCAL_RANK"]) for found in printed(text)]
    assert ranks == [(0, "0"), (1, "0"), (2, "1")]


def test_progress_bars_pass_at_once(folder):
    started = Launcher(["--num_gpus", "1", PROGRAM], folder, PLAN=plan(r0="bar"))
    assert started.end() == 0
    assert "50 %" in started.text and "100 %" in started.text


def test_a_reader_that_stalls_does_not_keep_ranks_from_their_end(folder):
    """`| less` is such a reader: it reads no more than it shows."""
    words = [sys.executable, "-m", "megatron_ds", "launch", "--num_gpus", "2", PROGRAM]
    variables = environment(PLAN=plan(others="flood"))
    with (folder / "errors").open("wb") as errors:
        launcher = subprocess.Popen(
            words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=errors
        )
    ready = b""
    while b"rank 0 waits" not in ready or b"rank 1 waits" not in ready:
        ready += launcher.stdout.read(1000)
    # All pipes are full by now, or soon.
    for _ in range(2):
        time.sleep(1)
        launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=HUNG) == 137
    launcher.stdout.close()


def test_errors_of_all_ranks_are_printed_once(folder):
    """The ranks of this package wait until rank 0 has printed an error that they share."""
    words = ["--num_gpus", "2", "--module", "megatron_ds", "train", "--numlayers", "2"]
    code, text = launch(words, folder)
    assert code == 2
    before = text[: text.index("failed first")]
    assert before.count("unknown flag --numlayers") == 1
    assert "rank 0 on localhost" in text


def test_a_last_line_without_an_end_is_printed(folder):
    (folder / "hello.py").write_text("print('the last words', end='')\n")
    code, text = launch(["--num_gpus", "1", "hello.py"], folder)
    assert code == 0 and "the last words" in text


@pytest.mark.parametrize(
    "launcher, commands",
    [
        ("ssh", ["ssh .* n1 .*", "ssh .* n2 .*"]),
        ("pdsh", ["PDSH_RCMD_TYPE=ssh .* -w n1,n2 .* --host %n'"]),
        ("slurm", ["srun --nodes 2 .* --nodelist n1,n2 .*"]),
        ("openmpi", ["PYTHONPATH=.* mpirun -n 2 --host n1:1,n2:1 .*"]),
    ],
)
def test_dry_run_prints_the_commands_also_of_programs_that_are_not_here(
    folder, launcher, commands
):
    (folder / "hosts").write_text("n1 slots=1\nn2 slots=2\n")
    words = ["--hostfile", "hosts", "--launcher", launcher, "--dry-run"]
    words += ["a script.py", "$HOME", "two\nlines"]
    code, text = launch(words, folder, PATH=str(folder))
    assert code == 0, text
    comment, *lines = text.splitlines()
    assert len(lines) == len(commands)
    start = r"# 3 ranks on n1 \(1\), n2 \(2\); rank 0 at n1:[23]\d{4} runs: "
    assert re.match(start, comment)
    assert comment.endswith("-u 'a script.py' --local_rank=0 '$HOME' 'two\\nlines'")
    for line, command in zip(lines, commands):
        assert re.fullmatch(command, line) and sys.executable in line
        assert "--listen" not in line  # a shell may have no input
    if launcher == "ssh":
        return
    # Without --dry-run its program is asked for.
    code, text = launch(
        [word for word in words if word != "--dry-run"], folder, PATH=""
    )
    assert code == 2 and "which is not installed here" in text


SLOW_AGENT = """
import sys, time
from megatron_ds.extensions.launch import agent, child

read = child.pieces

def slowly(stream):
    time.sleep(1)
    yield from read(stream)

child.pieces = slowly
sys.exit(agent.main(["--job", sys.argv[1], "--host", "localhost"]))
"""


def test_what_a_rank_wrote_last_is_printed_also_where_its_reader_is_late(folder):
    program = RankProgram(("./hello.sh",), python="")
    job = Job("late", {"localhost": [0]}, program, {}, str(folder), "127.0.0.1", 29500)
    (folder / "hello.sh").write_text("#!/bin/sh\necho the last words\n")
    (folder / "hello.sh").chmod(0o755)
    agent = subprocess.run(
        [sys.executable, "-c", SLOW_AGENT, job.encoded()],
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert "the last words" in agent.stdout, agent.stderr


def test_a_name_of_rank_0_that_a_host_does_not_know_is_named_before_a_rank_starts(
    folder,
):
    words = ["--num_gpus", "2", "--master_addr", "no-such-host.invalid", PROGRAM]
    code, text = launch(words, folder)
    assert code == 2
    assert "cannot resolve no-such-host.invalid, the address of rank 0" in text
    assert "no rank can be started on localhost" in text and not printed(text)


def test_two_launchers_of_one_machine_do_not_meet(folder):
    """Each trains on two ranks at the same time, without a port from the user."""
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-3"
    data = "--mock-data --vocab-size 61 --train-iters 2 --eval-iters 0"
    script = str(ROOT / "pretrain_gpt.py")
    words = ["--num_gpus", "2", script, *flags.split(), *data.split()]
    both = [Launcher(words, folder, OMP_NUM_THREADS="1") for _ in range(2)]
    for started in both:
        assert started.end() == 0, started.text


def test_the_reader_of_a_page_of_help_may_end_early(folder):
    """`head` closes the pipe after its lines."""
    command = [sys.executable, "-m", "megatron_ds", "--help"]
    for words in (command, [*command[:3], "launch", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            words, stdout=writer, stderr=subprocess.PIPE, env=environment(), text=True
        )
        os.close(writer)
        assert done.stderr == ""
