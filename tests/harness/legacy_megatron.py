"""mp_rank files as Megatron-LM wrote them before megatron-core, cut from logical tensors by plain slicing."""

import os
from argparse import Namespace
from pathlib import Path

import torch

from megatron_ds.compat.conversion.files.stored_tensor import WEIGHT
from megatron_ds.compat.conversion.formats import Wishes

HIDDEN, HEADS, LAYERS, ROWS, POSITIONS = 16, 4, 4, 24, 8
KEEP = Wishes(vocab_size=ROWS)


def logical_gpt(seed: int = 0) -> dict[str, torch.Tensor]:
    """A GPT of LAYERS layers with biases and a tied head, under our names, QKV rows [heads, 3, d]."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding.word_embeddings.weight": (ROWS, HIDDEN),
        "embedding.position_embeddings.weight": (POSITIONS, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}."
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            shapes |= {
                f"{name}{norm}.weight": (HIDDEN,),
                f"{name}{norm}.bias": (HIDDEN,),
            }
        for linear, rows, columns in (
            ("self_attention.linear_qkv", 3 * HIDDEN, HIDDEN),
            ("self_attention.linear_proj", HIDDEN, HIDDEN),
            ("mlp.linear_fc1", 4 * HIDDEN, HIDDEN),
            ("mlp.linear_fc2", HIDDEN, 4 * HIDDEN),
        ):
            shapes |= {
                f"{name}{linear}.weight": (rows, columns),
                f"{name}{linear}.bias": (rows,),
            }
    shapes |= {
        "decoder.final_layernorm.weight": (HIDDEN,),
        "decoder.final_layernorm.bias": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


LEAVES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "{attention}.query_key_value",
    "self_attention.linear_proj": "{attention}.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def qkv_of_version(rows: torch.Tensor, version: float) -> torch.Tensor:
    """Rows of one rank in the order of a checkpoint_version; the inverse of what a reader does."""
    d = HIDDEN // HEADS
    heads = rows.shape[0] // (3 * d)
    order = [
        (head, part, channel)
        for head in range(heads)
        for part in range(3)
        for channel in range(d)
    ]
    place = {
        0: lambda row: (row[1], row[0], row[2]),
        1.0: lambda row: (row[0], row[2], row[1]),
    }
    if version not in place:
        return rows
    return torch.stack(
        [rows[order.index(row)] for row in sorted(order, key=place[version])]
    )


def shard(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, 1)[rank].clone()
    if "linear_qkv" in name or "linear_fc1" in name or "word_embeddings" in name:
        return tensor.chunk(tp)[rank].clone()
    return tensor


def write_legacy(
    folder: Path,
    tensors: dict,
    *,
    tp: int,
    pp: int,
    chunks: int = 1,
    version: float | None = 3.0,
    spelling: str = "encoder",
    release: bool = False,
    **changes,
) -> Path:
    """Write all ranks' files; returns the folder of the iteration.

    spelling: "encoder", or "transformer" as the first versions named it. version None: the key is absent.
    changes: of the arguments.
    """
    path = folder / ("release" if release else "iter_0000005")
    for t in range(tp):
        for p in range(pp):
            models = [
                model_of(
                    tensors,
                    c * pp + p,
                    pp * chunks,
                    t,
                    tp,
                    version or 0,
                    spelling,
                    pp > 1,
                )
                for c in range(chunks)
            ]
            args = Namespace(
                **{
                    **dict(
                        num_layers=LAYERS,
                        hidden_size=HIDDEN,
                        num_attention_heads=HEADS,
                        seq_length=POSITIONS,
                        max_position_embeddings=POSITIONS,
                        padded_vocab_size=ROWS,
                        tensor_model_parallel_size=tp,
                        pipeline_model_parallel_size=pp,
                        rank=t + tp * p,
                        world_size=tp * pp,
                        bias_gelu_fusion=True,
                        layernorm_epsilon=1e-5,
                        consumed_train_samples=40,
                        make_vocab_size_divisible_by=4,
                    ),
                    **changes,
                }
            )
            content = {"args": args, "iteration": 0 if release else 5}
            content |= {"checkpoint_version": version} if version is not None else {}
            content |= (
                {"model": models[0]}
                if chunks == 1
                else {f"model{c}": model for c, model in enumerate(models)}
            )
            place = path / (
                f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            )
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(
        "release" if release else "5"
    )
    return path


def model_of(
    tensors: dict,
    stage: int,
    stages: int,
    rank: int,
    tp: int,
    version: float,
    spelling: str,
    has_copy: bool,
) -> dict:
    """One model chunk as its state dict is nested. has_copy: the last stage holds the tied embedding too."""
    attention = "attention" if spelling == "transformer" else "self_attention"
    layers, encoder = LAYERS // stages, {}
    words = shard(
        "word_embeddings", tensors["embedding.word_embeddings.weight"], rank, tp
    )
    for local in range(layers):
        for ours, theirs in LEAVES.items():
            for leaf in ("weight", "bias"):
                full = f"decoder.layers.{stage * layers + local}.{ours}.{leaf}"
                values = shard(full, tensors[full], rank, tp)
                if ours.endswith("linear_qkv"):
                    values = qkv_of_version(values, version)
                encoder[
                    f"layers.{local}.{theirs.format(attention=attention)}.{leaf}"
                ] = values
    model = {"language_model": {spelling: encoder}}
    if stage == 0:
        positions = {"weight": tensors["embedding.position_embeddings.weight"]}
        model["language_model"]["embedding"] = {
            "word_embeddings": {"weight": words},
            "position_embeddings": positions,
        }
    if stage == stages - 1:
        for leaf in ("weight", "bias"):
            encoder[f"final_layernorm.{leaf}"] = tensors[
                f"decoder.final_layernorm.{leaf}"
            ]
        if has_copy:
            model["word_embeddings_for_head"] = {"weight": words}
    return model


def check_equal(found, tensors, rows=ROWS):
    """The checkpoint has these weights, of the vocabulary the first rows."""
    assert found.tensors.keys() == {WEIGHT}
    assert found.tensors[WEIGHT].keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor[:rows] if name == "embedding.word_embeddings.weight" else tensor
        assert torch.equal(found.tensors[WEIGHT][name].read(), wanted), name


class Code:
    """Its pickle makes a file."""

    def __reduce__(self):
        return os.system, ("touch executed",)
