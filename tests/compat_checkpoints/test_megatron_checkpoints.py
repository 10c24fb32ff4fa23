"""Checkpoints that megatron-core wrote train on here as they do there, and ours train on there."""

import math
import pickle
from pathlib import Path

import pytest
import torch

from megatron_ds.compat.conversion.files.stored_tensor import WEIGHT
from megatron_ds.compat.conversion.formats import Wishes, detected
from megatron_ds.compat.conversion.megatron import (
    torch_dist_format,
    torch_format,
)
from megatron_ds.errors import CheckpointError
from tests.harness import megatron_core
from tests.harness.megatron_core import (
    BERT,
    EPS,
    GPT2,
    LLAMA,
    LR,
    MOE,
    ROWS,
    SEQUENCE,
    STEPS,
    MegatronCore,
    logical_weights,
    mean_loss,
    pipeline_weights,
)
from tests.harness.next_step import difference, next_step

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        bool(megatron_core.skip_reason()), reason=megatron_core.skip_reason()
    ),
]
OPTIONS = dict(
    vocab_size=ROWS,
    seq_length=SEQUENCE,
    lr=LR,
    min_lr=LR,
    weight_decay=0.1,
    adam_beta2=0.95,
    adam_eps=EPS,
)
READERS = {"torch_dist": torch_dist_format, "torch": torch_format}
ALL_ROWS = Wishes(vocab_size=ROWS)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    server = MegatronCore(tmp_path_factory.mktemp("megatron_core"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def llama(core):
    """Two tensor-parallel ranks, fp32, without the distributed optimizer, in both formats."""
    folder = core.folder / "llama"
    saves = [[name, str(folder / name), None] for name in READERS]
    return folder, core.run("llama", LLAMA, tp=2, saves=saves)


@pytest.fixture(scope="module")
def gpt2(core):
    """Two data-parallel ranks, fp32, distributed optimizer, in all its kinds."""
    folder = core.folder / "gpt2"
    saves = [
        ["torch_dist", str(folder / kind), kind]
        for kind in ("fully_reshardable", "dp_reshardable")
    ]
    saves.append(["torch", str(folder / "torch"), None])
    return folder, core.run("gpt2", GPT2, distributed=True, saves=saves)


def read(folder: Path, wishes: Wishes = ALL_ROWS):
    return detected(folder).read(folder, wishes)


def same(one, other) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        one.tensors[kind].keys() == other.tensors[kind].keys()
        and all(
            torch.equal(tensor.read().float(), other.tensors[kind][name].read().float())
            for name, tensor in of_kind.items()
        )
        for kind, of_kind in one.tensors.items()
    )


def trained_on(found, batch, layout: str):
    """(loss, logical weights) of one step of ours on the batch, from the state that was read."""
    trace, weights = next_step(found, batch, layout, **OPTIONS)
    return trace.losses[0], weights


@pytest.mark.parametrize(
    "layout, source",
    [
        ("tp=1", "torch_dist"),
        ("pp=2,dp=2,zero=1", "torch"),
        ("tp=2,zero=2,dp=2", "torch_dist"),
    ],
)
def test_the_next_step_of_a_llama_is_that_of_megatron_core(layout, source, core, llama):
    folder, ranks = llama
    found = read(folder / source)
    assert (
        found.progress.iteration,
        found.progress.num_updates,
        found.progress.samples,
    ) == (STEPS, STEPS, 8)
    loss, weights = trained_on(found, core.batches[STEPS], layout)
    theirs = logical_weights(ranks, LLAMA)
    moved = difference(
        {name: found.tensors[WEIGHT][name].read() for name in theirs}, theirs
    )
    assert moved > 1e-3, "the step changes too little to compare"
    assert abs(loss - mean_loss(ranks)) < 1e-5
    assert difference(weights, theirs) < 1e-5


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "dp=2,zero=3"])
def test_the_next_step_of_a_gpt_with_the_distributed_optimizer_is_that_of_megatron_core(
    layout, core, gpt2
):
    folder, ranks = gpt2
    found = read(folder / "fully_reshardable")
    loss, weights = trained_on(found, core.batches[STEPS], layout)
    assert abs(loss - mean_loss(ranks)) < 1e-5
    assert difference(weights, logical_weights(ranks[:1], GPT2)) < 1e-5


@pytest.fixture(scope="module")
def experts(core):
    """Two expert-parallel ranks, with and without the distributed optimizer."""
    folder, after = core.folder / "experts", {}
    for name, distributed in (("plain", False), ("distributed", True)):
        saves = [
            ["torch", str(folder / name / "torch"), None],
            ["torch_dist", str(folder / name / "torch_dist"), "fully_reshardable"],
        ]
        if distributed:
            saves.append(
                ["torch_dist", str(folder / name / "dp_reshardable"), "dp_reshardable"]
            )
        after[name] = core.run(
            f"experts {name}", MOE, ep=2, distributed=distributed, saves=saves
        )
    return folder, after


def logical_experts(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Weights of expert-parallel ranks as one process would hold them."""
    found, experts = {}, {}
    for rank, of_rank in enumerate(ranks):
        for name, value in of_rank["weights"].items():
            layer, is_expert, rest = name.partition(".local_experts.")
            if is_expert:
                number, _, leaf = rest.partition(".")
                held = MOE["num_moe_experts"] // len(ranks)
                experts.setdefault(f"{layer}.{leaf}", {})[rank * held + int(number)] = (
                    value
                )
            else:
                found.setdefault(name, value)
    assert all(len(tensors) == MOE["num_moe_experts"] for tensors in experts.values())
    return found | {
        name: torch.stack([tensors[i] for i in range(len(tensors))])
        for name, tensors in experts.items()
    }


@pytest.mark.parametrize("name", ["plain", "distributed"])
def test_the_next_step_of_a_model_with_experts_is_that_of_megatron_core(
    name, core, experts
):
    folder, ranks = experts[0] / name, experts[1][name]
    found = read(folder / "torch_dist")
    assert all(same(found, read(other)) for other in folder.iterdir())
    layout = "ep=2,dp=2" if name == "plain" else "tp=2,ep=2,dp=2"
    loss, weights = trained_on(found, core.batches[STEPS], layout)
    assert abs(loss - mean_loss(ranks)) < 1e-5
    assert difference(weights, logical_experts(ranks)) < 1e-5


@pytest.mark.parametrize("ep", [1, 2])
def test_a_model_with_experts_trains_on_in_megatron_core(ep, core, experts, tmp_path):
    folder, ranks = experts[0] / "plain", experts[1]["plain"]
    found = read(folder / "torch_dist")
    lines = torch_dist_format.write(
        found, tmp_path / "ours", Wishes(expert_parallel=ep)
    )
    assert any("--expert-model-parallel-size" in line for line in lines)
    assert keys_of(folder / "torch_dist") <= keys_of(tmp_path / "ours")
    assert (
        same(found, read(tmp_path / "ours"))
        and read(tmp_path / "ours").model == found.model
    )
    after = core.run(
        f"experts back {ep}",
        MOE,
        ep=ep,
        distributed=True,
        steps=0,
        first_batch=STEPS,
        load=[str(tmp_path / "ours"), "fully_reshardable"],
    )
    assert abs(mean_loss(after) - mean_loss(ranks)) < 1e-5
    assert (
        difference(
            logical_experts(after if ep > 1 else after[:1]), logical_experts(ranks)
        )
        < 1e-5
    )


def keys_of(folder: Path) -> set[str]:
    """Keys of the model in the index, read by torch."""
    index = pickle.loads((folder / f"iter_{STEPS:07d}/.metadata").read_bytes())
    return {
        key for key in index.state_dict_metadata if not key.startswith("optimizer.")
    }


def test_without_the_moments_the_next_step_is_another(core, llama):
    folder, ranks = llama
    found = read(folder / "torch_dist", Wishes(vocab_size=ROWS, weights_only=True))
    _, weights = trained_on(found, core.batches[STEPS], "tp=1")
    assert difference(weights, logical_weights(ranks, LLAMA)) > 1e-3


def test_all_formats_of_a_run_hold_the_same_state(llama, gpt2):
    assert same(read(llama[0] / "torch"), read(llama[0] / "torch_dist"))
    reference = read(gpt2[0] / "fully_reshardable")
    assert same(reference, read(gpt2[0] / "dp_reshardable"))
    assert same(reference, read(gpt2[0] / "torch"))
    assert {kind: len(tensors) for kind, tensors in reference.tensors.items()} == {
        "weight": 28,
        "exp_avg": 28,
        "exp_avg_sq": 28,
    }


@pytest.mark.parametrize("distributed", [False, True])
def test_pipeline_stages_in_bfloat16_are_merged_with_their_masters(distributed, core):
    name = f"stages{distributed}"
    folder = core.folder / name
    saves = [
        ["torch", str(folder / "torch"), None],
        ["torch_dist", str(folder / "dist"), "dp_reshardable" if distributed else None],
    ]
    ranks = core.run(
        name, GPT2, pp=2, dtype="bfloat16", distributed=distributed, saves=saves
    )
    one, other = read(folder / "torch"), read(folder / "dist")
    assert same(one, other)
    for stage, rank in enumerate(ranks):
        for theirs, weight in rank["saved"].items():
            if (
                theirs == "output_layer.weight"
            ):  # the last stage's copy of the embedding
                assert torch.equal(
                    weight, ranks[0]["saved"]["embedding.word_embeddings.weight"]
                )
                continue
            ours = theirs.replace("layers.0", f"layers.{stage}")
            master = one.tensors[WEIGHT][ours].read()
            assert master.dtype == torch.float32
            assert torch.equal(master.bfloat16(), weight), ours


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def virtual(request, core):
    """Two pipeline ranks with two chunks each and the distributed optimizer: (is tied, folder, ranks)."""
    name, tied = f"virtual{request.param}", request.param
    folder, model = (
        core.folder / name,
        {**GPT2, "num_layers": 4, "share_embeddings_and_output_weights": tied},
    )
    saves = [["torch", str(folder / "torch"), None]]
    saves += [
        ["torch_dist", str(folder / kind), kind]
        for kind in ("fully_reshardable", "dp_reshardable")
    ]
    return (
        tied,
        folder,
        core.run(name, model, pp=2, vp=2, distributed=True, saves=saves),
    )


def test_virtual_pipeline_stages_are_merged(virtual):
    """Optimizer state of the kind fully_reshardable has names of megatron-core. Of tied embeddings on two
    stages version 0.16.1 stores there other values than the weight has."""
    tied, folder, ranks = virtual
    named = read(folder / "torch")
    assert same(named, read(folder / "dp_reshardable"))
    other = read(folder / "fully_reshardable")
    if tied:
        with pytest.raises(
            CheckpointError,
            match="word_embeddings.weight is not what .*0.16.1.*--no-optim",
        ):
            same(named, other)
    else:
        assert same(named, other)
    for name, theirs in pipeline_weights(ranks, "saved").items():
        ours = (
            "embedding.word_embeddings.weight"
            if tied and name == "output_layer.weight"
            else name
        )
        assert torch.equal(named.tensors[WEIGHT][ours].read(), theirs), name


def test_the_next_step_of_virtual_stages_is_that_of_megatron_core(core, virtual):
    tied, folder, ranks = virtual
    layout, source = (
        ("pp=2,chunks=2", "torch") if tied else ("dp=2,zero=3", "fully_reshardable")
    )
    loss, weights = trained_on(read(folder / source), core.batches[STEPS], layout)
    theirs = pipeline_weights(ranks)
    if tied:
        assert torch.equal(
            theirs.pop("output_layer.weight"),
            theirs["embedding.word_embeddings.weight"],
        )
    assert abs(loss - mean_loss(ranks)) < 1e-5
    assert difference(weights, theirs) < 1e-5


@pytest.fixture(scope="module")
def bert(core):
    """Two tensor-parallel ranks without the distributed optimizer, in both formats."""
    folder = core.folder / "bert"
    return folder, core.run(
        "bert", BERT, tp=2, saves=[[kind, str(folder / kind), None] for kind in READERS]
    )


@pytest.mark.parametrize(
    "layout, source", [("tp=1", "torch"), ("pp=2,dp=2,zero=2", "torch_dist")]
)
def test_the_next_step_of_a_bert_is_that_of_megatron_core(layout, source, core, bert):
    """It trains masked tokens and the order of segments, so the head and the pooler of that are compared, too."""
    folder, ranks = bert
    found = read(folder / source)
    trace, weights = next_step(found, core.sentences[STEPS], layout, **OPTIONS)
    assert abs(trace.losses[0] - mean_loss(ranks)) < 1e-5
    assert abs(trace.metrics[0]["sop loss"] - mean_loss(ranks, "order")) < 1e-5
    theirs = logical_weights(ranks, BERT)
    before = {name: found.tensors[WEIGHT][name].read() for name in theirs}
    assert all((before[name] - theirs[name]).abs().max() > 1e-3 for name in theirs), (
        "a head is not trained"
    )
    assert difference(weights, theirs) < 1e-5


def test_a_bert_of_ours_is_read_by_megatron_core(core, bert, tmp_path):
    folder, ranks = bert
    found = read(folder / "torch")
    assert found.model["model"] == "bert" and found.optimizer == "adam"
    assert same(found, read(folder / "torch_dist"))
    torch_dist_format.write(found, tmp_path / "ours", Wishes())
    assert same(found, read(tmp_path / "ours"))
    assert keys_of(folder / "torch_dist") <= keys_of(tmp_path / "ours")
    after = core.run(
        "bert back",
        BERT,
        distributed=True,
        steps=0,
        first_batch=STEPS,
        load=[str(tmp_path / "ours"), "fully_reshardable"],
    )
    assert (
        after[0]["logits"][1] - ranks[0]["logits"][1][:2]
    ).abs().max() < 1e-5  # order of segments
    assert (
        difference(logical_weights(after[:1], BERT), logical_weights(ranks, BERT))
        < 1e-5
    )


def test_pipeline_stages_of_a_bert_are_merged(core):
    folder, untied = (
        core.folder / "stages of bert",
        {**BERT, "share_embeddings_and_output_weights": False},
    )
    core.run(
        "stages of bert",
        untied,
        pp=2,
        distributed=True,
        saves=[[kind, str(folder / kind), "fully_reshardable"] for kind in READERS],
    )
    assert same(read(folder / "torch"), read(folder / "torch_dist"))


def test_ours_trains_on_in_megatron_core(core, llama, tmp_path):
    folder, ranks = llama
    found = read(folder / "torch_dist")
    lines = torch_dist_format.write(found, tmp_path / "ours", Wishes())
    assert any("--use-checkpoint-args" in line for line in lines)
    assert keys_of(folder / "torch_dist") <= keys_of(tmp_path / "ours")
    after = core.run(
        "back",
        LLAMA,
        distributed=True,
        steps=0,
        first_batch=STEPS,
        load=[str(tmp_path / "ours"), "fully_reshardable"],
    )
    logits = torch.cat(
        [rank["logits"][0] for rank in ranks], -1
    )  # [b, s, v], cut over the vocabulary
    back = torch.cat([rank["logits"][0] for rank in after])  # two data-parallel ranks
    assert (back - logits).abs().max() < 1e-5
    assert abs(mean_loss(after) - mean_loss(ranks)) < 1e-5
    assert (
        difference(logical_weights(after[:1], LLAMA), logical_weights(ranks, LLAMA))
        < 1e-5
    )


def test_what_is_written_is_what_was_read(gpt2, tmp_path):
    found = read(gpt2[0] / "torch", Wishes(vocab_size=100))
    assert found.model["vocab_size"] == 100
    torch_dist_format.write(found, tmp_path / "ours", Wishes(shard_bytes=10_000))
    again = read(tmp_path / "ours", Wishes())
    assert same(found, again)
    assert again.model == found.model
    assert (again.progress.iteration, again.progress.num_updates) == (STEPS, STEPS)
    assert len(list((tmp_path / "ours/iter_0000002").glob("*.distcp"))) > 1
    assert math.isclose(again.training["optimizer.lr"], LR)
