"""Runs that train adapters: what they save, continue and refuse; what is planned of them; whole models of them."""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_ds.checkpoint.index import read_index
from megatron_ds.commands import main
from megatron_ds.compat.conversion.convert_checkpoint import run_tool as convert
from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.huggingface.peft_format import read as read_peft
from megatron_ds.compat.conversion.merge_adapter import run_tool as merge
from megatron_ds.compat.conversion.own_format import read as read_own
from megatron_ds.config import parse
from megatron_ds.errors import CheckpointError
from megatron_ds.extensions.optimizers.muon import has_matrices
from megatron_ds.planning.flops import layers_of, layers_of_run, model_flops
from megatron_ds.training.base_weights import of_weights
from tests.grid.axes.optimizers import LOOSE, MUON
from tests.harness.layout_runs import stray
from tests.harness.pretraining import MOCK, losses, run_pretrain, train
from tests.harness.tiny_jobs import tiny_job
from tests.planning.test_activations import RANKS, STYLES, kept
from tests.planning.test_rank_plan import check

pytestmark = pytest.mark.processes

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
).split()
LORA = ["--lora-rank", "2", "--lora-alpha", "8", "--lr", "1e-2"]
JOB = [*MOCK, *LLAMA, "--lr-decay-iters", "9"]


def steps(number: int) -> list[str]:
    return ["--train-iters", str(number)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A folder with the weights of two steps."""
    folder = str(tmp_path_factory.mktemp("base"))
    train(1, [*JOB, *steps(2), "--save", folder])
    return folder


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> Callable[[str], str]:
    """A function: further flags → a folder with the adapters of two steps."""

    @cache
    def train_once(kind: str) -> str:
        folder = str(tmp_path_factory.mktemp("adapter"))
        words = [*JOB, *LORA, *kind.split(), *steps(2), "--save", folder]
        train(1, [*words, "--pretrained-checkpoint", os.path.relpath(base)])
        return folder

    return train_once


@pytest.fixture(scope="module")
def adapter(trained) -> str:
    return trained("")


@pytest.mark.quick
@pytest.mark.parametrize(
    "kind, layout",
    [
        ("", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("--use-dora", "--zero-stage 3"),
        ("--lora-base-bits 4", "--pipeline-model-parallel-size 2"),
    ],
)
def test_adapters_alone_are_saved_and_continue_at_another_layout(
    base, trained, kind, layout, tmp_path
):
    words = [*JOB, *LORA, *kind.split(), *steps(4), "--pretrained-checkpoint", base]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(1, [*words, "--save", whole])
    train(2, [*words, *layout.split(), "--load", trained(kind), "--save", parts])
    continued = losses(parts)
    assert continued.keys() == {3, 4}
    expected = {step: losses(whole)[step] for step in continued}
    assert continued == pytest.approx(expected, rel=1e-6)
    index = read_index(parts / "iter_0000004")
    names = {key.partition("/")[2] for key in index.state_dict_metadata}
    assert names and all(".lora_" in name for name in names)


@pytest.mark.parametrize(
    "words, problem",
    [
        ([*LORA, "--load", "{base}"], "Give --pretrained-checkpoint"),
        (["--load", "{adapter}"], "holds adapters of rank 2"),
        (
            [*LORA, "--lora-rank", "3", "--load", "{adapter}"]
            + ["--pretrained-checkpoint", "{base}"],
            "rank: checkpoint 2, this run 3",
        ),
        ([*LORA, "--load", "{adapter}"], "this run has initial weights"),
        (
            [*LORA, "--use-dora", "--load", "{adapter}"]
            + ["--pretrained-checkpoint", "{base}"],
            "dora: checkpoint",
        ),
        (
            ["--pretrained-checkpoint", "{base}/none", "--save", "{base}/none"],
            "error: --pretrained-checkpoint",
        ),
        (
            [*LORA, "--pretrained-checkpoint", "{base}/none"],
            "error: --pretrained-checkpoint",
        ),
        (
            [*LORA, "--num-layers", "3", "--pretrained-checkpoint", "{base}"],
            "error: --pretrained-checkpoint {base}: the checkpoint belongs",
        ),
    ],
)
def test_what_does_not_fit_is_refused(base, adapter, words, problem):
    given = [word.format(base=base, adapter=adapter) for word in words]
    [ended] = run_pretrain(1, [*JOB, *steps(3), *given])
    assert ended.code == 2
    assert problem.format(base=base) in ended.err, ended.err


def test_of_a_base_that_has_trained_on_the_error_says_which_folder_to_make(
    base, adapter, tmp_path
):
    later, again = tmp_path / "later", tmp_path / "again"
    train(1, [*JOB, *steps(3), "--load", base, "--save", later])
    words = [*JOB, *LORA, *steps(3), "--load", adapter, "--pretrained-checkpoint"]
    [ended] = run_pretrain(1, [*words, later])
    assert ended.code == 2
    assert "copy iter_0000002 from there into a new folder, write 2 into" in ended.err
    # Which is done here.
    shutil.copytree(Path(base) / "iter_0000002", again / "iter_0000002")
    (again / "latest_checkpointed_iteration.txt").write_text("2")
    train(1, [*words, again])


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--prompt", "a"],
        ["export", "--output", "none"],
        ["upcycle", "--save", "none", "--num-experts", "4"],
    ],
)
def test_commands_that_need_a_model_refuse_adapters(
    adapter, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [])  # the command sets it
    with pytest.raises(SystemExit):
        main([*words, "--load", adapter])
    assert "merge-adapter" in capsys.readouterr().err


def test_a_command_starts_from_pretrained_weights_and_then_continues_its_own(
    base, tmp_path
):
    own, whole = tmp_path / "own", tmp_path / "whole"
    words = [*JOB, "--pretrained-checkpoint", base, "--save", own, "--load", own]
    train(1, [*words, *steps(1)])
    train(1, [*words, *steps(2)])
    train(1, [*JOB, *steps(2), "--load", base, "--finetune", "--save", whole])
    assert losses(own) == losses(whole)


def test_the_format_of_a_folder_of_adapters_is_not_that_of_the_weights_below():
    words = [*JOB, *LORA, *steps(1), "--pretrained-checkpoint", "b", "--load-format"]
    both = of_weights(parse([*words, "peft", "--load", "a"])).checkpoint
    assert (both.load, both.load_format) == ("b", None)
    alone = of_weights(parse([*words, "huggingface"])).checkpoint
    assert (alone.load, alone.load_format) == ("b", "huggingface")


@pytest.mark.parametrize("kind", ["", "--use-dora"])
def test_a_whole_model_of_both_is_what_peft_computes(
    trained, kind, tmp_path, monkeypatch
):
    import peft
    import transformers

    whole, parts, base = (str(tmp_path / name) for name in ("whole", "peft", "base"))
    adapter = trained(kind)
    monkeypatch.chdir(tmp_path)  # another one than that of the training
    merge(["--load", adapter, "--save", whole, "--to", "huggingface"])
    convert(["--load", adapter, "--save", parts, "--to", "peft"])
    named = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    convert(["--load", named["base_model_name_or_path"], "--save", base])
    read = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        merged = read(whole)(tokens).logits
        plain = read(base)(tokens).logits
        theirs = peft.PeftModel.from_pretrained(read(base), parts)(tokens).logits
    assert (merged - plain).abs().max() > 1e-2
    assert (merged - theirs).abs().max() < 1e-5
    # The folder of peft is read again as it was written.
    again = read_peft(Path(parts), Wishes(base=Path(base))).tensors["weight"]
    own = read_own(Path(adapter), Wishes()).tensors["weight"]
    for name, tensor in own.items():
        torch.testing.assert_close(again[name].read(), tensor.read())


def test_a_whole_model_has_what_its_routers_remember_from_the_adapters_steps(tmp_path):
    base, adapter, whole = (str(tmp_path / name) for name in ("base", "own", "whole"))
    experts = "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid".split()
    job = [*JOB, *experts, "--moe-router-load-balancing-type", "none", *steps(1)]
    train(1, [*job, "--save", base])
    train(1, [*job, *LORA, "--pretrained-checkpoint", base, "--save", adapter])
    merge(["--load", adapter, "--save", whole])
    biases = [
        {
            name: tensor.read().tolist()
            for name, tensor in read_own(Path(folder), Wishes())
            .tensors["weight"]
            .items()
            if name.endswith("expert_bias")
        }
        for folder in (whole, adapter, base)
    ]
    assert biases[0] == biases[1] != biases[2]
    # A folder of peft has no place for them.
    with pytest.raises(CheckpointError, match="moved .*expert_bias"):
        convert(["--load", adapter, "--save", str(tmp_path / "peft"), "--to", "peft"])


# ------------------------------------------------------------------ plans
@pytest.mark.parametrize(
    "layout, kind",
    [
        ("tp=2,sp=1,pp=2", ""),
        ("dp=2,zero=3", ""),
        ("tp=2,dp=2,zero=1", ""),
        ("cp=2,zero=2", ""),
        ("tp=2,sp=1,pp=2", "--use-dora"),
        ("tp=2,dp=2,zero=3", "--use-dora"),
    ],
)
def test_every_rank_sends_and_holds_what_was_planned(layout, kind):
    job = tiny_job("llama", "bf16", True, 0.0, 2, 12, 2)
    targets = ["--lora-target-modules", "q_proj,linear_fc2"]
    check([*job, "--lora-rank", "2", *targets, *kind.split()], layout)


def test_gradients_of_frozen_weights_are_no_flops():
    """Forward and the gradient of the input: 4 of 6 FLOPs of a weight; 6 of each weight of an adapter."""
    words = [*MOCK, *LLAMA, "--vocab-size", "60"]
    plain = parse(words)
    with_lora = parse([*words, "--lora-rank", "2"])
    model = plain.model
    whole = model_flops(layers_of(model), 1, 16, 61)
    scores = sum(layer.flops(16, 61).scores for layer in layers_of(model))
    h = 32
    kv = 16
    f = model.ffn_size
    channels = (h + h + 2 * kv) + 2 * h + (h + 2 * f) + (f + h)
    expected = (whole - scores) * 2 / 3 + scores + 6 * 16 * 2 * 2 * channels
    assert model_flops(layers_of_run(with_lora), 1, 16, 61) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", ["alone", "sp"])
def test_inputs_that_frozen_weights_alone_need_are_not_kept(ranks):
    number, layout = RANKS[ranks]
    job = [*STYLES["llama"], *layout, "--seq-length", "24", "--micro-batch-size", "1"]
    blocks = slice(1, 3)
    measured, _, planned = kept(
        [*job, "--lora-rank", "2", "--lora-target-modules", "q_proj"], number, blocks
    )
    assert measured == planned
    whole, _, _ = kept(job, number, blocks)
    assert measured < 0.8 * whole


def test_muon_updates_both_matrices_of_an_adapter_at_every_layout():
    """One of the two is whole on every rank."""
    job = tiny_job("llama", "fp32", True, 0.0, 2, 4, 3)
    muon = " ".join(f"{flag} {value}" for flag, value in MUON.items())
    words = [*job, *muon.split(), "--lora-rank", "2", "--use-dora"]
    apart, _ = stray(words, "tp=2,sp=1,dp=2,zero=2", 3)
    assert apart.is_within(LOOSE), apart
    run = parse([*words, "--micro-batch-size", "1"])
    [block] = [layer for layer in layers_of_run(run) if layer.is_block][:1]
    specs = [p.spec for p in block.make().parameters() if ".lora_" in p.spec.name]
    assert len(specs) == 12
    assert all(has_matrices(s) == (".lora_m." not in s.name) for s in specs)
