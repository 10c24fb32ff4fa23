"""tools/upcycle_checkpoint.py: dense checkpoints become checkpoints of models with experts."""

import json
import shutil
import weakref
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatron_ds.checkpoint.load import latest, read_run
from megatron_ds.checkpoint.run_file import checksum_of
from megatron_ds.checkpoint.tokenizer_files import named_copies
from megatron_ds.checkpoint.whole_tensors import StoredTensors
from megatron_ds.config import parse
from megatron_ds.config.parse import read
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.extensions.upcycling.upcycle_checkpoint import run_tool
from megatron_ds.extensions.upcycling.upcycling import Upcycling, is_exact
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_replica
from megatron_ds.training.run_checkpoint import check_same_run, load_run, save_run
from megatron_ds.training.run_description import describe_run
from megatron_ds.training.start import Start
from megatron_ds.training.step import train_step
from tests.harness.layout_comparison import mock_samples, open_loader
from tests.harness.pretraining import saved_state
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

STEP, BATCH, LAYERS = 7, 4, 2
FFN = "weight/decoder.layers.{}.mlp.{}linear_fc{}.{}"
STYLES = {
    name: [
        *tiny_job(name, "fp32", False, 0.0, LAYERS, BATCH, STEP),
        "--micro-batch-size",
        "2",
    ]
    for name in ("gpt2", "llama", "bert")
}


def engine_of(config):
    return build_replica(config, Mesh(Grid(), 0))


def loss_of(replica) -> float:
    """The loss of the first step."""
    config = replica.config
    with closing(
        open_loader(config, mock_samples(config, BATCH, seed=1), replica.mesh)
    ) as loader:
        batch = replica.batches.training(loader, Progress(), BATCH)
        return train_step(
            replica, batch, Progress(), learning_rate=0.0, weight_decay=0.0
        ).loss


def loaded(folder, config):
    replica = engine_of(config)
    load_run(replica, Start(STEP, read_run(folder, STEP), "id"))
    return replica


def set_router(replica, factor):
    for parameter in replica.parameters:
        if parameter.spec.name.endswith("router.weight"):
            parameter.data.mul_(factor)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(folder with a checkpoint, its loss) by style; each is made once. Biases and norms are not their
    initial zeros and ones."""
    made = {}

    def make(style):
        if style not in made:
            folder = tmp_path_factory.mktemp(style)
            config = parse([*STYLES[style], "--save", str(folder)])
            replica, draw = engine_of(config), torch.Generator().manual_seed(3)
            for parameter in replica.parameters:
                parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=draw))
            tokenizer = build_tokenizer(config.data, config.model)
            samples = STEP * BATCH
            progress = Progress(
                step=STEP, samples=samples, tokens=samples * config.model.seq_length
            )
            save_run(
                replica, progress, describe_run(config, config, tokenizer, "dense1")
            )
            loss = loss_of(
                loaded(
                    folder, parse([*STYLES[style], "--load", str(folder), "--finetune"])
                )
            )
            made[style] = folder, loss
        return made[style]

    return make


def upcycled(dense, tmp_path, *flags):
    """The replica of the new checkpoint, configured by its run.json alone."""
    run_tool(["--load", str(dense), "--save", str(tmp_path), *flags])
    assert latest(tmp_path) == STEP
    return loaded(
        tmp_path, parse(["--config", str(tmp_path / f"iter_{STEP:07d}" / "run.json")])
    )


EXACT = {
    "gpt2": ["--num-experts", "4"],
    "gpt2, parts": ["--num-experts", "4", "--moe-upcycling-granularity", "2"],
    "gpt2, sigmoid and bias": (
        "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-topk 3"
    ).split(),
    "llama": ["--num-experts", "5", "--moe-router-topk", "3"],
    "llama, parts and factor": (
        "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 "
        "--moe-router-topk-scaling-factor 2.5"
    ).split(),
    "llama, pyramid of residual experts": "--num-experts 4 8 --mlp-type residual".split(),
    "llama, groups": (
        "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--moe-upcycling-granularity 2"
    ).split(),
    "llama, one layer": ["--num-experts", "4", "--moe-layer-freq", "[0]*1+[1]*1"],
    "bert": ["--num-experts", "4", "--moe-upcycling-granularity", "2"],
}


@pytest.mark.parametrize("case", EXACT)
def test_the_upcycled_model_has_the_loss_of_the_dense_one_for_any_router(
    case, dense, tmp_path, capsys
):
    folder, loss = dense(case.partition(",")[0])
    replica = upcycled(folder, tmp_path, *EXACT[case])
    assert "computes what the dense one did\n" in capsys.readouterr().out
    set_router(replica, 30.0)
    assert loss_of(replica) == pytest.approx(loss, rel=1e-6)


PRE_SOFTMAX = {
    "gpt2": "--num-experts 4 --moe-router-pre-softmax --moe-router-topk 1".split(),
    "gpt2, parts": "--num-experts 8 --moe-router-pre-softmax --moe-upcycling-granularity 2".split(),
    "llama, parts": (
        "--num-experts 8 --moe-router-pre-softmax --moe-router-topk 4 "
        "--moe-upcycling-granularity 4"
    ).split(),
    "llama, one sigmoid": "--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid".split(),
}


@pytest.mark.parametrize("case", PRE_SOFTMAX)
def test_where_weights_depend_on_the_scores_the_loss_is_equal_for_equal_scores(
    case, dense, tmp_path, capsys
):
    folder, loss = dense(case.partition(",")[0])
    replica = upcycled(folder, tmp_path, *PRE_SOFTMAX[case])
    assert "only where the router scores all experts alike" in capsys.readouterr().out
    assert loss_of(replica) != pytest.approx(loss, rel=1e-6)
    set_router(replica, 0.0)
    assert loss_of(replica) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    "flags, parts, exact",
    [
        ([], 2, True),
        (["--moe-expert-capacity-factor", "1"], 1, False),
        (["--moe-router-noise", "gumbel"], 1, True),
        (["--moe-router-noise", "gumbel"], 2, False),
        (["--moe-router-noise", "jitter"], 2, True),
        (["--moe-router-num-groups", "4", "--moe-router-group-topk", "2"], 2, False),
    ],
)
def test_what_is_told_of_the_loss_considers_capacity_noise_and_groups(
    flags, parts, exact
):
    assert (
        is_exact(read([*STYLES["llama"], "--num-experts", "4", *flags]).model, parts)
        == exact
    )


def test_experts_are_copies_of_the_feed_forward_or_its_parts_and_routers_are_drawn_as_in_a_new_run(
    dense, tmp_path
):
    folder, _ = dense("llama")
    old = saved_state(folder, STEP)
    for parts in (1, 2):
        path = tmp_path / str(parts)
        replica = upcycled(
            folder,
            path,
            "--num-experts",
            "4",
            "--moe-upcycling-granularity",
            str(parts),
        )
        new, width = saved_state(path, STEP), replica.config.model.ffn_size // parts
        assert {name.partition("/")[0] for name in new} == {"weight"}
        gate_up, down = (
            old[FFN.format(1, "", 1, "weight")],
            old[FFN.format(1, "", 2, "weight")],
        )
        gate, up = gate_up.chunk(2)
        for expert in range(4):
            rows = slice(expert % parts * width, (expert % parts + 1) * width)
            assert torch.equal(
                new[FFN.format(1, "experts.", 1, "weight")][expert],
                torch.cat((gate[rows], up[rows])),
            )
            assert torch.equal(
                new[FFN.format(1, "experts.", 2, "weight")][expert],
                down[:, rows] * parts,
            )
        unchanged = {
            name for name in old if name.startswith("weight/") and ".mlp." not in name
        }
        assert unchanged and all(
            torch.equal(new[name], old[name]) for name in unchanged
        )
        drawn = {p.spec.name: p.detach() for p in engine_of(replica.config).parameters}
        name = "decoder.layers.1.mlp.router.weight"
        if parts == 1:
            assert torch.equal(new[f"weight/{name}"], drawn[name])
        else:
            assert torch.equal(
                new[f"weight/{name}"], drawn[name][:2].repeat_interleave(2, 0)
            )


def test_the_new_run_json_identifies_the_new_model(dense, tmp_path):
    folder, _ = dense("llama")
    upcycled(folder, tmp_path, "--num-experts", "4", "--moe-upcycling-granularity", "2")
    run, old = read_run(tmp_path, STEP), read_run(folder, STEP)
    config = parse(
        [
            *STYLES["llama"],
            "--load",
            str(tmp_path),
            "--finetune",
            "--num-experts",
            "4",
            "--moe-ffn-hidden-size",
            str(old["identity"]["model"]["ffn_size"] // 2),
        ]
    )
    now = describe_run(
        config, config, build_tokenizer(config.data, config.model), "new"
    )
    check_same_run(run, now, config.checkpoint)
    assert run["run_id"] != old["run_id"] and run["progress"] == old["progress"]
    assert run["upcycled_from"] == {
        "load": str(folder),
        "step": STEP,
        "run_id": "dense1",
        "granularity": 2,
    }
    assert run["config"]["checkpoint"]["save"] is None


def test_a_dense_tensor_is_read_once_and_few_are_in_memory(
    dense, tmp_path, monkeypatch
):
    folder, _ = dense("llama")
    read, names, alive, most = StoredTensors.read, [], weakref.WeakSet(), []

    def counted(self, entry):
        tensor = read(self, entry)
        names.append(entry.name)
        alive.add(Held(tensor))
        most.append(sum(1 for _ in alive))
        return tensor

    class Held:
        def __init__(self, tensor):
            tensor.held = self  # lives as long as the tensor

    monkeypatch.setattr(StoredTensors, "read", counted)
    run_tool(["--load", str(folder), "--save", str(tmp_path), "--num-experts", "8"])
    weights = {name for name in saved_state(folder, STEP) if name.startswith("weight/")}
    assert sorted(f"weight/{name}" for name in names) == sorted(weights)
    assert max(most) <= 3


def test_a_crash_leaves_nothing_that_looks_complete(dense, tmp_path, monkeypatch):
    folder, _ = dense("llama")
    read, calls = StoredTensors.read, []

    def broken(self, entry):
        calls.append(entry)
        if len(calls) == 5:
            raise OSError(5, "Input/output error")
        return read(self, entry)

    monkeypatch.setattr(StoredTensors, "read", broken)
    words = ["--load", str(folder), "--save", str(tmp_path), "--num-experts", "4"]
    with pytest.raises(CheckpointError, match="Input/output error"):
        run_tool(words)
    assert latest(tmp_path) is None and not [
        p for p in tmp_path.iterdir() if "iter" in p.name
    ]
    run_tool(words)
    assert latest(tmp_path) == STEP


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "no layer with experts"),
        (
            ["--num-experts", "4", "--moe-upcycling-granularity", "3"],
            "granularity 3 does not divide",
        ),
        (
            ["--num-experts", "4", "--moe-upcycling-granularity", "0"],
            "not a number of parts",
        ),
        (
            "--num-experts 4 --moe-router-topk 3 --moe-upcycling-granularity 2".split(),
            "does not divide --moe-router-topk 3",
        ),
        (
            ["--num-experts", "4", "--moe-ffn-hidden-size", "24"],
            "--moe-ffn-hidden-size 24.*Omit the flag",
        ),
        (
            ["--num-experts", "4", "--moe-shared-expert-intermediate-size", "16"],
            "no weights for shared experts",
        ),
        (
            ["--num-experts", "4", "--num-layers", "3"],
            "num_layers: checkpoint 2, this run 3",
        ),
        (["--num-expert", "4"], "--num-experts"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    flags, message, dense, tmp_path
):
    folder, _ = dense("llama")
    with pytest.raises((ConfigError, CheckpointError), match=message):
        run_tool(["--load", str(folder), "--save", str(tmp_path / "new"), *flags])
    assert latest(tmp_path / "new") is None


@pytest.mark.parametrize("kind", ["sinkhorn", "expert_choice"])
def test_choices_that_do_not_follow_from_the_scores_are_refused(kind):
    model = read(
        [
            *STYLES["llama"],
            "--num-experts",
            "4",
            "--moe-router-load-balancing-type",
            kind,
        ]
    ).model
    with pytest.raises(ConfigError, match=f"{kind}: .* Upcycle with aux_loss"):
        Upcycling(model, seed=1).check()


@pytest.mark.parametrize("path", ["../a", "/a/b", "a/../../b", ".", "", 3])
def test_files_of_a_tokenizer_outside_of_the_folder_of_the_run_are_refused(path):
    with pytest.raises(
        CheckpointError, match="tokenizer_files is not a table of paths in that folder"
    ):
        named_copies(Path("runs"), {"tokenizer_files": {"tokenizer_model": path}})


@pytest.mark.parametrize("path", ["../tokenizer.json", "."])
def test_files_of_a_tokenizer_are_copied_from_the_folder_of_the_run_only(
    path, dense, tmp_path
):
    source, new = tmp_path / "runs" / "dense", tmp_path / "new" / "experts"
    shutil.copytree(dense("llama")[0], source)
    file = source / f"iter_{STEP:07d}" / "run.json"
    run = json.loads(file.read_text()) | {"tokenizer_files": {"tokenizer_model": path}}
    file.write_text(json.dumps(run | {"checksum": checksum_of(run)}))
    with pytest.raises(
        CheckpointError, match="tokenizer_files is not a table of paths in that folder"
    ):
        run_tool(["--load", str(source), "--save", str(new), "--num-experts", "2"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "runs"]
    assert [p.name for p in new.parent.iterdir()] == ["experts"] and not list(
        new.glob("iter_*")
    )


def test_other_folders_are_refused(dense, tmp_path):
    folder, _ = dense("llama")
    words = ["--num-experts", "4", "--load", str(folder), "--save"]
    run_tool([*words, str(tmp_path / "new")])
    with pytest.raises(CheckpointError, match="holds another run"):
        run_tool([*words, str(tmp_path / "new")])
    with pytest.raises(CheckpointError, match="holds another run"):
        run_tool([*words, str(folder)])
    with pytest.raises(CheckpointError, match="has experts already"):
        run_tool(
            [
                *words[:2],
                "--load",
                str(tmp_path / "new"),
                "--save",
                str(tmp_path / "newer"),
            ]
        )
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run_tool(
            [
                *words[:2],
                "--load",
                str(tmp_path / "none"),
                "--save",
                str(tmp_path / "newer"),
            ]
        )
    assert "upcycled_from" in json.loads(
        (tmp_path / "new" / f"iter_{STEP:07d}" / "run.json").read_text()
    )
