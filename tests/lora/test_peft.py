"""Adapters against peft's: the same values in the same model, trained by the same steps."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_ds.compat.conversion.adapter_tensors import adapters_in_memory, shifted
from megatron_ds.compat.conversion.family import entries_of, model_of, to_theirs
from megatron_ds.compat.conversion.filling import fill, plan_filling
from megatron_ds.compat.conversion.foreign_start import load_foreign, read_foreign
from megatron_ds.compat.conversion.formats import Wishes, format_of
from megatron_ds.compat.conversion.huggingface.families import FAMILIES
from megatron_ds.compat.conversion.huggingface.peft_adapter import (
    PREFIX,
    check_config,
    from_peft,
    targets_of,
    to_peft,
    with_own_factors,
)
from megatron_ds.config import parse
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.run_checkpoint import all_pieces, frozen_pieces
from tests.harness.huggingface_models import V, saved
from tests.harness.layout_comparison import (
    DOCUMENT_ENDS,
    merge,
    parse_layout,
    random_samples,
    train_layout,
)
from tests.harness.next_step import flags_of
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

RANK = 3
ALPHA = 6
STEPS = 10
BATCH = 4
RATE = 1e-2
ADAM = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01}
FLAGS = (
    f"--lora-rank {RANK} --lora-alpha {ALPHA} --lr {RATE} --min-lr {RATE} --clip-grad 0 --adam-beta2 0.95 "
    "--adam-eps 1e-5 --weight-decay 0.01 --seq-length 16 --hidden-dropout 0 --attention-dropout 0"
).split()
LATENT = "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj"
OTHER_HALVES = "deepseek_v3, one group, queries without a latent, other halves"
# (model, whether magnitudes are trained) → modules with adapters, layout
CASES = {
    ("llama", False): ("q_proj v_proj o_proj gate_proj down_proj", "tp=2,sp=1"),
    ("qwen3, tied", False): ("q_proj k_proj v_proj up_proj", "pp=2,zero=1"),
    ("gpt2", False): ("c_attn c_proj c_fc", "dp=2,zero=3"),
    ("mixtral", False): ("k_proj o_proj", "tp=2"),
    ("bamba", False): ("in_proj out_proj q_proj down_proj", "tp=2,sp=1"),
    ("mamba2", False): ("in_proj", "tp=2,dp=2,zero=1"),
    ("nemotron_h", False): ("in_proj v_proj up_proj", "pp=2"),
    ("qwen3_5", False): ("out_proj o_proj gate_proj", "tp=2"),
    ("granite 4, dense, rotary", True): ("in_proj out_proj o_proj", "dp=2,zero=3"),
    ("falcon_h1", False): ("in_proj k_proj", "tp=2,sp=1"),
    ("llama", True): ("q_proj v_proj o_proj gate_proj down_proj", "tp=2,zero=3,dp=2"),
    ("qwen3, tied", True): ("q_proj k_proj o_proj up_proj", "pp=2,zero=1"),
    ("gpt2", True): ("c_attn c_proj c_fc", "tp=2,sp=1"),
    ("mixtral", True): ("k_proj o_proj", "cp=2,ep=2"),
    ("deepseek_v3", False): (LATENT, "pp=2,dp=2,zero=1"),
    ("deepseek_v3", True): (LATENT, "tp=2,sp=1,pp=2"),
    (OTHER_HALVES, False): ("q_proj kv_a_proj_with_mqa o_proj", "dp=2,zero=3"),
}


def peft_of(folder, modules: str, use_dora: bool = False, **settings):
    """A model with adapters, none of which is 0."""
    import peft
    import transformers

    torch.manual_seed(3)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=modules.split(),
            fan_in_fan_out="c_attn" in modules,
            use_dora=use_dora,
            **settings,
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        if "magnitude" in name:
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
    return model


def values_of(model) -> dict[str, torch.Tensor]:
    """The adapters, as peft names them in a file."""
    return {
        name.replace(".default", "").replace(
            "vector.weight", "vector"
        ): value.detach().clone()
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def peft_trains(model, samples) -> list[float]:
    """The losses of the steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, **ADAM)
    losses = []
    for step in range(STEPS):
        rows = samples[step * BATCH : (step + 1) * BATCH]
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name, use_dora", CASES)
def test_training_is_that_of_peft(name, use_dora, tmp_path):
    modules, layout = CASES[name, use_dora]
    folder = saved(name, tmp_path)
    theirs = peft_of(folder, modules, use_dora)
    samples = random_samples(STEPS * BATCH, 16, V, seed=5)
    samples = samples.where(samples % DOCUMENT_ENDS != 0, V - 1)  # as a run reads them
    found = format_of("huggingface").read(folder, Wishes())
    family = FAMILIES[theirs.config.model_type]
    # The run's layers are named by the modules, and its adapters have their values.
    request = parse_layout(layout, mbs="2")
    flags = [*flags_of(found.model), *FLAGS, *request.flags]
    model = parse(flags, world_size=request.world_size).model
    specs = {entry.ours: entry.spec for entry in entries_of(family, model)}
    shift = partial(shifted, below=found.tensors["weight"], specs=specs)
    absolute = from_peft(values_of(theirs), family, model)
    ours = shift(adapters_in_memory(absolute, "peft"), sign=-1)
    targets = targets_of(ours)
    # Biases of routers are remembered beside the adapters.
    below = found.tensors["weight"]
    biases = {name: below[name] for name in below if name.endswith("expert_bias")}
    if use_dora:
        flags.append("--use-dora")
    config = parse(
        [*flags, "--lora-target-modules", *targets], world_size=request.world_size
    )

    def load(engine):
        load_foreign(engine, found, frozen_pieces(engine), engine.config.checkpoint)
        pieces = all_pieces(engine)
        own = {**biases, **ours}
        fill(
            plan_filling(pieces, {"weight": own}, ("weight",)), engine.mesh.coordinates
        )
        engine.optimizer.after_load()

    def rank_trains(rank, world):
        mesh = Mesh(config.grid(), rank, world.connect, torch.device("cpu"))
        return train_layout(config, mesh, STEPS, samples, watch=load)

    trace, weights = merge(run_ranks(request.world_size, rank_trains))
    assert trace.losses == pytest.approx(peft_trains(theirs, samples), rel=1e-5)
    adapters = {name: w for name, w in weights.items() if ".lora_" in name}
    whole = shift(adapters_in_memory(adapters, "ours"), sign=1)
    after = to_peft({n: t.read() for n, t in whole.items()}, family, model)
    expected = values_of(theirs)
    assert after.keys() == expected.keys()
    for key, value in expected.items():
        apart = (after[key] - value).norm() / value.norm()
        assert apart < 1e-5, (key, float(apart))
    assert all(key.startswith(PREFIX) for key in after)


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {"q_proj": 2}},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 2]]},
        {"alora_invocation_tokens": [1, 2]},
    ],
)
def test_adapters_that_are_computed_otherwise_are_refused(settings):
    check_config({"init_lora_weights": True, "layer_replication": None}, "here")
    with pytest.raises(CheckpointError, match=next(iter(settings))):
        check_config(settings, "here")


OTHER_FACTORS = {
    "another factor": {"use_rslora": True},
    "factors of modules": {
        "alpha_pattern": {"layers.0.self_attn.q_proj": 2, "o_proj": 9}
    },
    "both": {"use_rslora": True, "alpha_pattern": {"q_proj": 2}},
    "one layer": {"layers_to_transform": [1]},
}


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("settings", OTHER_FACTORS.values(), ids=OTHER_FACTORS)
def test_other_factors_and_fewer_layers_have_the_sum_of_peft(settings, kind, tmp_path):
    base = saved("llama", tmp_path / "base")
    model = peft_of(base, "q_proj v_proj o_proj", **settings)
    model.save_pretrained(tmp_path / "in", safe_serialization=kind == "safetensors")
    if kind == "bin":
        values = values_of(model)
        (tmp_path / "in/adapter_model.safetensors").unlink(missing_ok=True)
        torch.save(values, tmp_path / "in/adapter_model.bin")
    found = format_of("peft").read(tmp_path / "in", Wishes(base=base))
    format_of("huggingface").write(found, tmp_path / "whole", Wishes())
    ours = load_file(tmp_path / "whole/model.safetensors")
    theirs = model.merge_and_unload().state_dict()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6)
    untouched = load_file(base / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    assert not torch.allclose(ours[name], untouched[name], atol=1e-3)


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_of_latents_are_read_merged_and_written(use_dora, tmp_path):
    base = saved("deepseek_v3", tmp_path / "base")
    model = peft_of(base, LATENT, use_dora)
    model.save_pretrained(tmp_path / "in")
    wishes = Wishes(base=base)
    found = format_of("peft").read(tmp_path / "in", wishes)
    downs = {"linear_q_down_proj", "linear_kv_down_proj"}
    assert downs < {*found.adapters.targets}
    format_of("huggingface").write(found, tmp_path / "whole", Wishes())
    ours = load_file(tmp_path / "whole/model.safetensors")
    untouched = load_file(base / "model.safetensors")
    import transformers

    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert not torch.allclose(ours[name], untouched[name], atol=1e-3)
    # The same folder of peft again.
    format_of("peft").write(found, tmp_path / "again", wishes)
    files = [
        tmp_path / f"{place}/adapter_model.safetensors" for place in ("in", "again")
    ]
    before, after = map(load_file, files)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)
    import peft

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "again").eval()
    tokens = torch.arange(12)[None] % V
    with torch.no_grad():
        expected = merged.eval()(tokens).logits
        torch.testing.assert_close(again(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_run_does_not_continue_adapters_of_a_part_of_the_layers(tmp_path):
    base = saved("llama", tmp_path / "base")
    model = peft_of(base, "o_proj", layers_to_transform=[1])
    model.save_pretrained(tmp_path / "in")
    found = format_of("peft").read(tmp_path / "in", Wishes(base=base))
    lora = "--lora-rank 3 --lora-alpha 6 --lora-target-modules o_proj".split()
    places = ["--load", tmp_path / "in", "--pretrained-checkpoint", base]
    given = [*flags_of(found.model), *lora, *map(str, places)]
    train = "--micro-batch-size 1 --seq-length 16 --lr 1e-3".split()
    config = parse([*given, *train])
    with pytest.raises(
        CheckpointError, match="adapters of 1 of 2 layers .*merge-adapt"
    ):
        read_foreign(config, "peft")


@pytest.mark.parametrize("pattern", [{"(a+)+b": 2}, {"q_proj": "2"}, {"": 2}])
def test_a_pattern_that_is_no_name_is_refused(pattern, tmp_path):
    base = saved("llama", tmp_path / "base")
    peft_of(base, "o_proj").save_pretrained(tmp_path / "in")
    settings = tmp_path / "in/adapter_config.json"
    changed = {**json.loads(settings.read_text()), "alpha_pattern": pattern}
    settings.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="alpha_pattern has .* and a number"):
        format_of("peft").read(tmp_path / "in", Wishes(base=base))


def test_a_pickle_of_something_else_is_no_adapter(tmp_path):
    base = saved("llama", tmp_path / "base")
    peft_of(base, "o_proj").save_pretrained(tmp_path / "in")
    (tmp_path / "in/adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither adapter_model.safetensors nor"):
        format_of("peft").read(tmp_path / "in", Wishes(base=base))
    for content in ([1], {"a": 3}, {3: torch.ones(1)}):
        torch.save(content, tmp_path / "in/adapter_model.bin")
        with pytest.raises(CheckpointError, match="adapter_model.bin is not a table"):
            format_of("peft").read(tmp_path / "in", Wishes(base=base))


DAMAGED = {
    "no rank": {"r": None},
    "rank 0": {"r": 0},
    "another rank": {"r": 4},
    "no factor": {"lora_alpha": None},
    "an infinite factor": {"lora_alpha": float("inf")},
    "another model": {"base_model_name_or_path": "wide"},
    "a file that is cut": {},
}


def test_damaged_folders_and_those_of_another_model_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, folder = saved("llama", tmp_path / "base"), tmp_path / "adapter"
    saved("llama 3, tied, wide heads", tmp_path / "wide")
    peft_of(base, "o_proj").save_pretrained(folder)
    settings, file = (
        folder / "adapter_config.json",
        folder / "adapter_model.safetensors",
    )
    plain = json.loads(settings.read_text()) | {"base_model_name_or_path": "base"}
    settings.write_text(json.dumps(plain))
    assert format_of("peft").read(folder, Wishes()).adapters
    for what, changes in DAMAGED.items():
        settings.write_text(json.dumps(plain | changes))
        if not changes:
            file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(CheckpointError):
            format_of("peft").read(folder, Wishes())
            pytest.fail(what)


def test_an_adapter_is_written_complete_or_not_at_all(tmp_path):
    base = saved("llama", tmp_path / "base")
    peft_of(base, "o_proj").save_pretrained(tmp_path / "adapter")
    wishes = Wishes(base=base)
    found = format_of("peft").read(tmp_path / "adapter", wishes)
    format_of("peft").write(found, tmp_path / "again", wishes)
    again = format_of("peft").read(tmp_path / "again", wishes)
    assert again.adapters.tensors.keys() == found.adapters.tensors.keys()
    # A file, and a folder in which none can be made.
    (tmp_path / "file").write_text("")
    for place, why in ((tmp_path / "file", "not empty"), (Path("/proc/a"), "written")):
        with pytest.raises(CheckpointError, match=why):
            format_of("peft").write(found, place, wishes)
    assert (tmp_path / "file").read_text() == ""


def test_an_adapter_of_a_layer_that_is_several_modules_has_one_first_matrix(tmp_path):
    """Projections of a gated delta net, and of attention with gates."""
    found = format_of("huggingface").read(saved("qwen3_next", tmp_path), Wishes())
    family = FAMILIES["qwen3_next"]
    model = model_of(found.model, "the test")
    draw = torch.Generator().manual_seed(4)
    rows = {0: (80, 8), 3: (128, 32, 32)}
    mixed = "decoder.layers.{}.self_attention.{}.{}.weight"
    ours = {
        mixed.format(i, name, leaf): torch.randn(*shape, generator=draw)
        for i, name in ((0, "in_proj"), (3, "linear_qkv"))
        for leaf, shape in (("lora_a", (RANK, 32)), ("lora_b", (sum(rows[i]), RANK)))
    }
    theirs = to_peft(ours, family, model)
    sizes = [len(v) for name, v in theirs.items() if "lora_B" in name]
    assert sizes == [*rows[0], *rows[3]]
    back = from_peft(theirs, family, model)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], value) for name, value in ours.items())
    # Each product is that of the merged weights.
    weights = to_theirs(entries_of(family, model), found.tensors["weight"], model)
    assert {name.removeprefix(PREFIX).split(".lora")[0] for name in theirs} <= {
        name.removesuffix(".weight") for name in weights
    }
    other = {n: v + 1 if "in_proj_ba.lora_A" in n else v for n, v in theirs.items()}
    with pytest.raises(CheckpointError, match="in_proj_ba have not the same A"):
        from_peft(other, family, model)
    pattern = {"lora_alpha": 2, "alpha_pattern": {"in_proj_ba": 3}}
    with pytest.raises(CheckpointError, match="a factor of .*in_proj_ba"):
        with_own_factors(ours, pattern, family, model)


def test_half_an_adapter_is_refused(tmp_path):
    folder = saved("llama", tmp_path)
    found = format_of("huggingface").read(folder, Wishes())
    values = values_of(peft_of(folder, "q_proj v_proj"))
    values.pop(next(name for name in values if "q_proj.lora_B" in name))
    model = parse([*flags_of(found.model), *FLAGS, "--micro-batch-size", "1"]).model
    with pytest.raises(CheckpointError, match="one matrix of two"):
        from_peft(values, FAMILIES["llama"], model)
