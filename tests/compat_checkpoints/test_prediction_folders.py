"""Layers of Hugging Face folders that predict later tokens: transformers reads what we write, and computes the same."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from megatron_ds.batch.ledger import Ledger
from megatron_ds.compat.conversion.family import model_of
from megatron_ds.compat.conversion.files.stored_tensor import (
    LogicalCheckpoint,
    StoredTensor,
)
from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.huggingface.families import FAMILIES
from megatron_ds.compat.conversion.huggingface.format import (
    FORMAT as HUGGING_FACE,
)
from megatron_ds.compat.conversion.own_format import FORMAT as OURS
from megatron_ds.errors import CheckpointError
from megatron_ds.models import MODELS, build_stage, run_layers
from megatron_ds.models.specs import specs_of
from megatron_ds.moe.balance import balances_of
from tests.harness.gpt_runs import make_batch
from tests.harness.huggingface_models import MODELS as THEIR_MODELS
from tests.harness.huggingface_models import saved
from tests.harness.model_runs import context_of

pytestmark = [pytest.mark.processes, pytest.mark.one_in(2, together=True)]

transformers = pytest.importorskip("transformers", reason="it is not installed")
DEPTHS, LENGTH = 2, 12
# Families → the class of their settings.
NAMES = {"glm4_moe": "Glm4MoeConfig", "deepseek_v3": "DeepseekV3Config"}


def options_of(family: str) -> dict:
    """Return the options of the tiny model of the family, with depths."""
    settings = {**THEIR_MODELS[family][1], "num_mtp_layers": DEPTHS}
    name = {"llama": "LlamaConfig", **NAMES}[family]
    config = getattr(transformers, name)(**settings)
    found = FAMILIES[family].options(config.to_dict())
    return found | {"mtp_num_layers": DEPTHS}


def random_checkpoint(folder, family: str) -> LogicalCheckpoint:
    options = options_of(family)
    draw = torch.Generator().manual_seed(4)
    tensors = {}
    for spec in specs_of(model_of(options, folder)):
        values = torch.randn(spec.shape, generator=draw) / spec.shape[-1] ** 0.5
        if "norm.weight" in spec.name:
            values = values + 0.8
        tensors[spec.name] = StoredTensor(
            tuple(spec.shape), torch.float32, lambda v=values: v, spec.name
        )
    return LogicalCheckpoint(
        folder, options, {"weight": tensors}, source={"family": family}
    )


@pytest.fixture(scope="module", params=NAMES)
def written(request, tmp_path_factory):
    """(checkpoint, the folder of Hugging Face with its weights)."""
    folder = tmp_path_factory.mktemp("predicting")
    checkpoint = random_checkpoint(folder, request.param)
    HUGGING_FACE.write(checkpoint, folder / "theirs", Wishes(family=request.param))
    return checkpoint, folder / "theirs"


def copied(folder, to, change=lambda tensors: tensors, **settings):
    """The folder with other tensors or settings."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text()) | settings
    (to / "config.json").write_text(json.dumps(config))
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_the_files_have_the_names_of_published_ones(written):
    _, folder = written
    names = load_file(folder / "model.safetensors").keys()
    of_first = {
        name.removeprefix("model.layers.3.")
        for name in names
        if name.startswith("model.layers.3.")
    }
    assert {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
        "embed_tokens.weight",
        "self_attn.o_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.experts.3.down_proj.weight",
    } <= of_first
    assert any(name.startswith("model.layers.4.") for name in names)
    assert not any(name.startswith("model.layers.5.") for name in names)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == DEPTHS


def test_transformers_computes_the_losses_and_gradients_of_the_depths(written):
    checkpoint, folder = written
    batch = make_batch(model_of(checkpoint.model, folder), b=2, s=LENGTH)
    modules, means = of_ours(checkpoint, batch)
    main, depths, expected = of_transformers(folder, batch)
    torch.testing.assert_close(means, expected, rtol=1e-5, atol=0)
    named = {p.spec.name: p for p in modules.parameters()}
    for k, layer in enumerate(depths.layers):
        for leaf in ("enorm", "hnorm", "eh_proj"):
            theirs = getattr(layer, leaf).weight.grad
            assert_near(named[f"mtp.layers.{k}.{leaf}.weight"].grad, theirs)
    words = named["embedding.word_embeddings.weight"].grad
    theirs = main.get_input_embeddings().weight.grad
    assert_near(words[: len(theirs)], theirs)


def assert_near(ours, theirs):
    """To 1e-5 of the largest element."""
    largest = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * largest)


def of_ours(checkpoint, batch):
    """(modules with the gradients of the sum of the losses of all depths, these losses)."""
    config = model_of(checkpoint.model, checkpoint.folder)
    modules = build_stage(MODELS["gpt"](config, context_of()))
    stored = checkpoint.tensors["weight"]
    with torch.no_grad():
        for p in modules.parameters():
            rows = stored[p.spec.name].shape[0]
            p.zero_()[:rows].copy_(stored[p.spec.name].read())
    for balance in balances_of(modules):
        balance.place(torch.device("cpu"))
        for spec, tensor in balance.tensors():
            tensor.copy_(stored[spec.name].read())
    ledger = Ledger()
    run_layers(modules, None, batch.with_ledger(ledger))
    entries = [entry for entry in ledger.take() if entry.name.startswith("mtp ")]
    means = [entry.value / entry.count for entry in entries]
    sum(means).backward()
    return modules, torch.stack(means).detach()


def of_transformers(folder, batch):
    """(model, depths, losses), with gradients of the sum of the losses."""
    from transformers.modeling_layers import MtpModel

    main = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    # It has the numbers of published models; here the first of these layers is the fourth.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]
    depths = MtpModel.from_pretrained(main).eval()
    positions = batch.position_ids
    hidden = main.model(batch.tokens).last_hidden_state
    means = []
    for k, layer in enumerate(depths.layers, 1):
        later = F.pad(batch.tokens[:, k:], (0, k))
        labels = F.pad(batch.labels[:, k:], (0, k))
        mask = F.pad(batch.loss_mask[:, k:], (0, k))
        words = main.get_input_embeddings()(later)
        hidden = layer(
            words,
            hidden,
            position_embeddings=main.model.rotary_emb(words, position_ids=positions),
            attention_mask=None,
            position_ids=positions,
            cache=None,
        )
        logits = main.lm_head(hidden)
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
        means.append((losses * mask.flatten()).sum() / mask.sum())
    sum(means).backward()
    return main, depths, torch.stack(means).detach()


def test_a_folder_comes_back_bit_by_bit(written, tmp_path):
    checkpoint, folder = written
    read = HUGGING_FACE.read(folder, Wishes(mtp_num_layers=DEPTHS))
    assert read.model["mtp_num_layers"] == DEPTHS and not read.unused
    for name, tensor in checkpoint.tensors["weight"].items():
        assert torch.equal(read.tensors["weight"][name].read(), tensor.read()), name
    OURS.write(read, tmp_path / "ours", Wishes())
    HUGGING_FACE.write(
        OURS.read(tmp_path / "ours", Wishes()), tmp_path / "back", Wishes()
    )
    before, after = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("depths", [None, 1])
def test_layers_that_are_not_asked_for_are_listed_as_unused(depths, written):
    checkpoint, folder = written
    read = HUGGING_FACE.read(folder, Wishes(mtp_num_layers=depths))
    first = 3 + (depths or 0)
    left = {int(name.split(".")[2]) for name in read.unused}
    assert left == set(range(first, 3 + DEPTHS))
    assert read.model.get("mtp_num_layers", 0) == (depths or 0)
    expected = {
        name
        for name in checkpoint.tensors["weight"]
        if not name.startswith("mtp.") or int(name.split(".")[2]) + 3 < first
    }
    assert read.tensors["weight"].keys() == expected


def test_a_folder_without_copies_is_read(written, tmp_path):
    """transformers writes none."""
    checkpoint, folder = written
    bare = lambda tensors: {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("shared_head.head.weight", "4.embed_tokens.weight"))
    }
    theirs = copied(folder, tmp_path / "bare", bare)
    read = HUGGING_FACE.read(theirs, Wishes(mtp_num_layers=DEPTHS))
    assert read.tensors["weight"].keys() == checkpoint.tensors["weight"].keys()


def test_what_a_folder_lacks_or_has_beside_is_named(written, tmp_path):
    _, folder = written
    with pytest.raises(CheckpointError, match="states 2 layers.*--mtp-num-layers 2"):
        HUGGING_FACE.read(folder, Wishes(mtp_num_layers=3))

    def other(tensors):
        tensors["model.layers.3.shared_head.head.weight"][0, 0] += 1
        return tensors

    theirs = copied(folder, tmp_path / "other", other)
    with pytest.raises(
        CheckpointError, match="differs from lm_head.weight, which each"
    ):
        HUGGING_FACE.read(theirs, Wishes(mtp_num_layers=1))

    def short(tensors):
        del tensors["model.layers.4.eh_proj.weight"]
        return tensors

    theirs = copied(folder, tmp_path / "short", short)
    HUGGING_FACE.read(theirs, Wishes(mtp_num_layers=1))
    with pytest.raises(CheckpointError, match="model.layers.4.eh_proj.weight"):
        HUGGING_FACE.read(theirs, Wishes(mtp_num_layers=2))
    theirs = copied(folder, tmp_path / "text", num_nextn_predict_layers="two")
    with pytest.raises(CheckpointError, match="'two', not a number of layers"):
        HUGGING_FACE.read(theirs, Wishes())


def test_a_family_without_such_layers_has_no_depths(tmp_path):
    checkpoint = random_checkpoint(tmp_path, "llama")
    with pytest.raises(CheckpointError, match="differs.*mtp_num_layers"):
        HUGGING_FACE.write(checkpoint, tmp_path / "out", Wishes(family="llama"))
    assert not (tmp_path / "out").exists()
    theirs = saved("llama", tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="states 0 layers"):
        HUGGING_FACE.read(theirs, Wishes(mtp_num_layers=1))
