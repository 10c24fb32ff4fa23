"""What each rank is given, computed without starting anything."""

import argparse
import os
import socket
from dataclasses import replace

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.launch import command
from megatron_ds.extensions.launch.agent import host_of
from megatron_ds.extensions.launch.cores import physical_cores, share
from megatron_ds.extensions.launch.flag_values import core_list
from megatron_ds.extensions.launch.job import Job, RankProgram
from megatron_ds.extensions.launch.no_effect import sentences
from megatron_ds.extensions.launch.rank_process import cores_of
from megatron_ds.extensions.launch.variables import exported_variables

pytestmark = pytest.mark.plan

ODD_WORDS = (
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "%h %n %%",
    "new\nline",
    "ü→",
    "",
    "--",
    "`id`",
    "\\",
    "*",
)
JOB = Job(
    name="0123",
    slots={"n1": (1,), "n2": (0, 2, 3)},
    program=RankProgram(("train.py", *ODD_WORDS), "python", has_local_rank=True),
    variables={"NCCL_DEBUG": "INFO"},
    folder="/work",
    master_address="10.0.0.1",
    master_port=29501,
)
# Rows: host, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, CUDA_VISIBLE_DEVICES
RANKS = [
    ("n1", "0", "0", "1", "0", "1"),
    ("n2", "1", "0", "3", "1", "0,2,3"),
    ("n2", "2", "1", "3", "1", "0,2,3"),
    ("n2", "3", "2", "3", "1", "0,2,3"),
]


def test_the_environment_of_each_rank_where_hosts_have_unequal_slots():
    found = []
    for host in JOB.hosts:
        for rank in JOB.ranks(host):
            given = JOB.environment(host, rank)
            names = (
                "RANK",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
                "GROUP_RANK",
                "CUDA_VISIBLE_DEVICES",
            )
            found.append((host, *(given[name] for name in names)))
            assert given["WORLD_SIZE"] == "4"
            assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "29501")
            assert (given["LOCAL_SIZE"], given["CROSS_SIZE"]) == (
                given["LOCAL_WORLD_SIZE"],
                "2",
            )
            assert given["CROSS_RANK"] == given["GROUP_RANK"]
            assert given["NCCL_DEBUG"] == "INFO"
    assert found == RANKS


def test_a_job_travels_as_one_word_without_change():
    word = JOB.encoded()
    assert set(word) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_="
    )
    back = Job.decoded(word)
    assert back.program.words == JOB.program.words
    assert back.encoded() == word


def test_a_job_of_four_thousand_hosts_fits_into_one_argument():
    slots = {f"worker-{i:05}.cluster.example": tuple(range(8)) for i in range(4000)}
    job = Job("0", slots, JOB.program, {}, "/work", "a", 1)
    assert len(job.encoded()) < 128 * 1024  # of Linux, for an argument


@pytest.mark.parametrize("word", ["", "!", "eJw=", "e30="])
def test_another_word_is_refused(word):
    with pytest.raises(ConfigError, match="--job is no job"):
        Job.decoded(word)


@pytest.mark.parametrize(
    "given, environ, host",
    [
        ("n2", {}, "n2"),
        ("1", {}, "n2"),
        ("", {"SLURMD_NODENAME": "n2", "SLURM_NODEID": "0"}, "n2"),
        ("", {"SLURM_NODEID": "1"}, "n2"),
        ("", {"OMPI_COMM_WORLD_RANK": "0"}, "n1"),
    ],
)
def test_an_agent_knows_its_host(given, environ, host):
    assert host_of(JOB, given, environ) == host


def test_an_agent_of_another_host_is_refused():
    with pytest.raises(ConfigError, match="n7.* is none of the job's hosts: n1, n2"):
        host_of(JOB, "n7", {})


def test_cores_are_shared_out_equally():
    bound = Job(
        "0", {"h": (0, 1)}, JOB.program, {}, "/", "a", 1, bound_cores=core_list("1,4-7")
    )
    assert [bound.cores("h", rank) for rank in bound.ranks("h")] == [[1, 4], [5, 6]]


def test_ranks_get_whole_cores_socket_by_socket(tmp_path, monkeypatch):
    """Two sockets of three cores with two threads each; the second threads have the numbers from 6 on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)) - {11})
    for number in range(12):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{number % 2}\n")
        (topology / "core_id").write_text(f"{number % 6 // 2}\n")
    found = physical_cores(tmp_path)
    assert found == [[0, 6], [2, 8], [4, 10], [1, 7], [3, 9], [5]]
    assert [share(found, 2, i) for i in (0, 1)] == [
        [0, 2, 4, 6, 8, 10],
        [1, 3, 5, 7, 9],
    ]
    assert [share(found, 4, i) for i in range(4)] == [[0, 6], [2, 8], [4, 10], [1, 7]]
    # without a description by the kernel
    assert physical_cores(tmp_path / "none") == [[core] for core in range(11)]


def test_all_cores_are_those_that_the_agent_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    job = replace(JOB, slots={"h": (0,)}, bound_cores=())
    [rank] = job.ranks("h")
    assert job.cores("h", rank) == [3]
    two = replace(job, slots={"h": (0, 1)})
    with pytest.raises(ConfigError, match="1 cores cannot be shared by 2 ranks"):
        two.cores("h", rank)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("1-x", "'1-x' is no core"),
        ("²", "is no core"),
        ("", "is no core"),
        ("0-99999999", "is no core"),
        ("5-2", "ends before it begins"),
        ("3,1", "not above core 3"),
    ],
)
def test_texts_that_list_no_cores_are_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        core_list(text)


def test_cores_that_a_host_does_not_have_are_refused():
    job = replace(JOB, bound_cores=[999_998, 999_999])
    host = job.hosts[0]
    with pytest.raises(ConfigError, match="on cores 99999[89].* of n1, which has"):
        cores_of(job, host, next(iter(job.ranks(host))))


# ------------------------------------------------------------------------------------------ command lines
# Command lines after the name `deepspeed`, with the words of a rank's program.
LINES = [
    ("train.py --lr 1", "train.py --local_rank=0 --lr 1"),
    (
        "--num_gpus 1 pretrain_gpt.py --num-layers 2 --deepspeed --deepspeed_config ds.json",
        "pretrain_gpt.py --local_rank=0 --num-layers 2 --deepspeed --deepspeed_config ds.json",
    ),
    (
        "--num_nodes=1 --num_gpus=1 --master_port=29511 main.py --deepspeed_config=ds.json",
        "main.py --local_rank=0 --deepspeed_config=ds.json",
    ),
    ("--include localhost:0 train.py -H x", "train.py --local_rank=0 -H x"),
    ("-i localhost:0 train.py --include y", "train.py --local_rank=0 --include y"),
    ("--exclude=localhost:9x train.py", None),
    ("--no_local_rank --num_gpus 1 train.py a", "train.py a"),
    ("--num_gpus 1 --module pkg.train --x 1", "pkg.train --local_rank=0 --x 1"),
    ("--num_gpus 1 --no_python ./run.sh 1", "./run.sh --local_rank=0 1"),
    ("--num_gpus 1 --bind_cores_to_rank train.py", "train.py --local_rank=0"),
    (
        "--num_gpus 1 --save_pid --enable_each_rank_log logs train.py",
        "train.py --local_rank=0",
    ),
    ("--launcher_args --exclusive --num_gpus 1 train.py", "train.py --local_rank=0"),
    ("--num_nodes -1 --num_gpus 1 train.py", "train.py --local_rank=0"),
    # The beginning of a flag, and values that have no effect.
    ("--num_gpu 1 --mod --master_p=29511 train", "train --local_rank=0"),
    (
        "--hostfile= --num_gpus 1 train.py --num_gpu 2",
        "train.py --local_rank=0 --num_gpu 2",
    ),
    (
        "--hostfile /nowhere --node_rank 0 --num_gpus 1 train.py",
        "train.py --local_rank=0",
    ),
]


def job_of_line(line: str) -> Job:
    args = command._parsed(line.split())
    slots = command.slots_of(args, {})
    return command.job_of(args, slots, "local", command.means_of(args, "local", {}))


@pytest.mark.parametrize("line, program", LINES)
def test_command_lines_of_deepspeed_start_the_same_programs(line, program):
    if program is None:
        with pytest.raises(ConfigError):
            job_of_line(line)
        return
    job = job_of_line(line)
    made = job.program.command(0)
    assert made[made.index(job.program.words[0]) :] == program.split()
    interpreter = [] if "--no_python" in line else [os.sys.executable, "-u"]
    assert made[: len(interpreter)] == interpreter
    assert ("-m" in made) == ("--mod" in line)


def test_deepspeeds_parser_finds_the_same_script_and_arguments():
    """Each line is read by DeepSpeed's own parser, too."""
    theirs = pytest.importorskip("deepspeed.launcher.runner")
    for line, program in LINES:
        if (
            program is None or "--launcher_args" in line
        ):  # its parser refuses such a value
            continue
        read = theirs.parse_args(line.split())
        args = command._parsed(line.split())
        assert (read.user_script, read.user_args) == (args.script, args.arguments), line


def test_the_appended_local_rank_is_read_by_the_training_commands():
    line = "--num_gpus 2 pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    line += "--seq-length 16 --micro-batch-size 2 --train-iters 4 --lr 1e-3 --mock-data --vocab-size 61"
    job = job_of_line(line)
    [_, second] = job.ranks("localhost")
    words = job.program.command(second.local_rank)
    environ = job.environment("localhost", second)
    parsed = parse(
        words[words.index("pretrain_gpt.py") + 1 :], world_size=2, env=environ
    )
    assert parsed.train.train_iters == 4


NAMED = "GPU-8f1c,MIG-0a2b"


@pytest.mark.parametrize(
    "flags, visible, devices",
    [
        ([], "2,3", "2,3"),
        (["--num_nodes", "1"], "2,3", "2,3"),
        ([], NAMED, NAMED),
        ([], "5", "5"),
        (["--num_gpus", "1"], "2,3", "2"),
        (["--num_gpus", "1"], NAMED, "GPU-8f1c"),
        (["--num_gpus", "2"], "", ""),
        ([], "-1", "-1"),
        (["--num_gpus", "2"], None, "0,1"),
        # these are numbers of devices
        (["--include", "localhost:0"], "2,3", "0"),
    ],
)
def test_ranks_get_the_devices_that_the_launcher_was_given(
    flags, visible, devices, monkeypatch
):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment_of_rank(flags, environ, monkeypatch) == devices


@pytest.mark.parametrize("scheduler", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
@pytest.mark.parametrize(
    "flags, given, devices",
    [
        (["--num_gpus", "1"], "1", "1"),
        (["--num_gpus", "2"], "4,6,7", "4,6"),
        (["--num_gpus", "2"], NAMED, NAMED),
        # an allocation numbers its own devices
        (["--include", "localhost:0"], "3,5", "3"),
    ],
)
def test_ranks_get_the_devices_of_the_allocation(
    scheduler, flags, given, devices, monkeypatch
):
    environ = {"CUDA_VISIBLE_DEVICES": given, scheduler: "7"}
    assert environment_of_rank(flags, environ, monkeypatch) == devices


def environment_of_rank(flags, environ, monkeypatch) -> str:
    """CUDA_VISIBLE_DEVICES of ranks on eight GPUs; environ: of the launcher and of the agent"""
    monkeypatch.setattr(command.devices, "count", lambda: 8)
    for name in ("CUDA_VISIBLE_DEVICES", *command.devices.ALLOCATIONS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    args = command._parsed([*flags, "train.py"])
    slots = command.slots_of(args, environ)
    means = command.means_of(args, "local", environ)
    job = command.job_of(args, slots, "local", means)
    [rank, *_] = job.ranks("localhost")
    given = job.environment("localhost", rank, environ)
    return given["CUDA_VISIBLE_DEVICES"]


def test_more_ranks_than_given_devices_are_refused_where_there_are_gpus(monkeypatch):
    line = ["--num_gpus", "3"]
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    with pytest.raises(ConfigError, match="lists 2 devices, and the job has slot 2"):
        environment_of_rank(line, environ, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(command.devices, "count", lambda: 0)
    slots = (0, 1, 2)
    assert command.devices.visible(slots, environ, "n1") == "4,5"


# --------------------------------------------------------------------------------------------------- the port
def test_each_start_has_a_free_port_of_its_own_unless_one_is_given():
    ports = {job_of_line("--num_gpus 1 train.py").master_port for _ in range(20)}
    assert len(ports) > 15 and 29500 not in ports
    assert job_of_line("--master_port 29511 train.py").master_port == 29511


def test_a_port_at_which_a_process_listens_is_left_out():
    first = command.port_of_job("0f.0", 1)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", first))
        busy.listen()
        assert command.port_of("0f", False, {}) == command.port_of_job("0f.1", 1)


def test_launchers_of_one_host_each_find_the_same_port():
    names = ("0f", "1e")
    of_slurm = {command.port_of(name, True, {"SLURM_JOB_ID": "7"}) for name in names}
    assert len(of_slurm) == 1 and 29500 not in of_slurm
    assert {command.port_of(name, True, {}) for name in names} == {29500}


@pytest.mark.parametrize(
    "line, message",
    [
        ("--num_gpus 0 train.py", "must be a whole number from 1 to .*, got 0"),
        ("--num_gpus 1.5 train.py", "must be a whole number"),
        ("--num_gpus 999999 train.py", "from 1 to 4096, got 999999"),
        ("--num_gpus 99999999999 train.py", "must be a whole number"),
        ("--master_port 70000 train.py", "from 1 to 65535, got 70000"),
        ("--grace-seconds nan train.py", "must be a number from 0 on, got nan"),
        ("--launcher_args 'x train.py", "launcher_args 'x: No closing quotation"),
        ("--module --no_python train", "give one of them"),
        ("--node_rank 1 train.py", "Add --no_ssh"),
        ("--min-nodes 1 train.py", "add --max-restarts N"),
        ("--num_nodes 2 train.py", "without a hostfile"),
        ("--num_gpus 1 --include localhost:0 train.py", "give one pair"),
        ("--autotuning tune train.py", "add --deepspeed_config FILE"),
        ("--launcher impi train.py", "not supported; use openmpi or slurm"),
        ("--numgpus 2 train.py", "unknown flag --numgpus; did you mean '--num_gpus'"),
        ("--hostfile /nowhere --num_nodes 2 train.py", "without a hostfile"),
        ("--hostfile /proc/self/mem train.py", "mem cannot be read: .*Input/output"),
        ("--no_s train.py", "unknown flag --no_s"),
        ("--nproc-per-node 2 train.py", "of torchrun: use --num_gpus"),
        ("--nnodes=2 train.py", "of torchrun: use --num_nodes"),
        ("--num_gpus 1", r"arguments are required: script\."),
        ("--launcher slurm train.py", "within an allocation"),
    ],
)
def test_what_cannot_be_started_is_refused_with_a_reason(line, message, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises((ConfigError, argparse.ArgumentTypeError), match=message):
        command.main(["--dry-run", *line.split()])


def test_an_allocation_that_scontrol_cannot_list_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"SLURM_JOB_NODELIST=n\[1-2\]: .*scontrol"):
        command.slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}, None)


# ---------------------------------------------------------------------------------------------- variables
def test_variables_come_from_the_environment_and_from_three_places_of_the_file(
    tmp_path,
):
    home, folder, other = (tmp_path / name for name in ("home", "folder", "other"))
    for place in (home, folder):
        place.mkdir()
    (home / ".deepspeed_env").write_text("A=home\nB=home\n\n# a comment\n")
    (folder / ".deepspeed_env").write_text("B=folder\nexport C='two words'\nD=a=b\n")
    other.write_text("A=other\n")
    environ = {
        "NCCL_DEBUG": "INFO",
        "PYTHONHASHSEED": "0",
        "SECRET": "x",
        "PYTHONPATH": "/p",
    }
    found = exported_variables(environ, home, folder)
    assert found == {
        "NCCL_DEBUG": "INFO",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": f"{folder}:/p",
        "A": "home",
        "B": "folder",
        "C": "two words",
        "D": "a=b",
    }
    named = exported_variables({"DS_ENV_FILE": str(other)}, home, folder)
    assert named == {"A": "other", "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "text, reason",
    [
        (b"A=1\nnot one\n", "line 2: 'not one' is not NAME=VALUE"),
        (b"A=1\n\nB=\0\n", "line 3: .* is not NAME=VALUE"),
        (b"A=\xff\n", ".deepspeed_env cannot be read: 'utf-8' codec"),
    ],
)
def test_a_file_that_sets_no_variables_is_refused(tmp_path, text, reason):
    (tmp_path / ".deepspeed_env").write_bytes(text)
    with pytest.raises(ConfigError, match=reason):
        exported_variables({}, tmp_path, tmp_path / "absent")


def test_a_file_that_is_named_and_is_not_there_sets_nothing(tmp_path):
    for name in ("cluster.env", "/nowhere/cluster.env", ""):
        found = exported_variables({"DS_ENV_FILE": name}, tmp_path, tmp_path)
        assert found == {"PYTHONPATH": str(tmp_path)}


# ------------------------------------------------------------------------------------ what has no effect
@pytest.mark.parametrize(
    "line, environ, said",
    [
        ("train.py", {"CUDA_VISIBLE_DEVICES": "0", "DS_ENV_FILE": ""}, []),
        ("--node_rank 0 --hostfile= train.py", {}, []),
        ("--hostfile /nowhere train.py", {}, ["no file --hostfile /nowhere"]),
        ("--hostfile / train.py", {}, ["on this machine"]),
        ("--num_gpus 2 train.py", {"CUDA_VISIBLE_DEVICES": "2,3"}, []),
        ("-i localhost:0 train.py", {"CUDA_VISIBLE_DEVICES": "2"}, ["=2 is ignored"]),
        (
            "-i localhost:0 train.py",
            {"CUDA_VISIBLE_DEVICES": "2", "SLURM_JOB_ID": "7"},
            [],
        ),
        ("train.py", {"DS_ENV_FILE": "no.env"}, ["DS_ENV_FILE=no.env, neither in"]),
        ("--hostfile HOSTS --node_rank 0 train.py", {}, ["ranks of 2 hosts"]),
        ("--hostfile HOSTS --no_ssh --node_rank 0 train.py", {}, []),
    ],
)
def test_what_has_no_effect_is_said(line, environ, said, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=2\nn2 slots=2\n")
    args = command._parsed(line.replace("HOSTS", str(hosts)).split())
    found = [*sentences(args, command.slots_of(args, environ), environ)]
    assert len(found) == len(said)
    assert all(text in sentence for text, sentence in zip(said, found))


def test_a_hostfile_may_be_a_pipe_of_the_shell():
    reader, writer = os.pipe()
    os.write(writer, b"n1 slots=2\n")
    os.close(writer)
    args = command._parsed(["--hostfile", f"/dev/fd/{reader}", "train.py"])
    assert command.slots_of(args, {}) == {"n1": (0, 1)}
    os.close(reader)


# ------------------------------------------------------------------------------------ the address of rank 0
@pytest.mark.parametrize(
    "hosts, flags, address",
    [
        (["localhost"], [], "127.0.0.1"),
        (["n1"], [], "127.0.0.1"),
        (["n1", "n2"], ["--no_ssh", "--node_rank", "1"], "n1"),
        (["n1", "n2"], ["--launcher", "slurm"], "n1"),
        (["localhost", "n2"], ["--no_ssh", "--node_rank", "1"], None),
        (["localhost", "n2"], ["--launcher", "openmpi"], None),
    ],
)
def test_all_hosts_of_a_job_find_its_rank_0(hosts, flags, address):
    args = command._parsed([*flags, "train.py"])
    slots = {host: (0,) for host in hosts}
    name = command.launcher_of(args, slots)
    means = command.means_of(args, name, {})
    if address is None:
        with pytest.raises(ConfigError, match="another machine on each of the 2 hosts"):
            command.master_address(args, slots, name, means)
        return
    assert command.master_address(args, slots, name, means) == address


def test_a_first_host_that_is_this_machine_is_asked_for_its_address(monkeypatch):
    asked = []

    def answer(words, **options):
        asked.append(words[-2:])
        return argparse.Namespace(stdout="10.0.0.7 172.17.0.1\n")

    monkeypatch.setattr(command.subprocess, "run", answer)
    args = command._parsed(["train.py"])
    slots = {"localhost": (0,), "n2": (0,)}
    means = command.means_of(args, "ssh", {})
    assert command.master_address(args, slots, "ssh", means) == "10.0.0.7"
    assert asked == [["localhost", "hostname -I"]]
