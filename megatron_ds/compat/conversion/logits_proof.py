"""The proof of a conversion: outputs of both programs for the same random tokens, in fp32 on the CPU.

Both models are in memory, in fp32.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from ...batch.batch import Batch
from ...batch.ledger import DISCARDING
from ...config.options.model import ModelConfig
from ...errors import CheckpointError
from ...host.packages import missing_package
from ...models import MODELS, build_stage
from ...models.stage_modules import run_layers
from ...moe.balance import StepState
from ...mpu.context import ParallelContext
from ...mpu.group import solo
from ...mpu.managed_parameter import spec_of
from ...mpu.parameter_piece import ParameterPiece
from .family import model_of
from .files.stored_tensor import WEIGHT, LogicalCheckpoint
from .filling import fill, plan_filling
from .huggingface.format import FORMAT as HUGGING_FACE

SEED = 1234
SAMPLES = 2
MOST_TOKENS = 128
Outputs = list[torch.Tensor]


def random_tokens(model: ModelConfig) -> torch.Tensor:
    """Return int64 [2, s], s as long as the model allows, up to 128."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(
        0,
        model.vocab_size,
        (SAMPLES, min(model.positions, MOST_TOKENS)),
        generator=generator,
    )


@torch.inference_mode()
def our_outputs(checkpoint: LogicalCheckpoint, tokens: torch.Tensor) -> Outputs:
    """Return the logits [b, s, vocabulary] of our model, and those of the order of segments of a BERT, [b, 2]."""
    # The whole model runs on one process, at the length of the tokens.
    model = replace(
        model_of(checkpoint.model, checkpoint.folder), seq_length=tokens.shape[1]
    )
    modules = build_stage(MODELS[model.model](model, ParallelContext()))
    # Weights are filled as in a load of training.
    pieces = [
        ParameterPiece(spec_of(p), p.detach().view(-1))
        for p in modules.parameters()
        if not spec_of(p).tied_copy
    ]
    state = StepState(modules, solo(), torch.device("cpu"))
    fill(
        plan_filling([*pieces, *state.pieces()], {WEIGHT: checkpoint.tensors[WEIGHT]}),
        {},
    )
    # The batch is one of evaluation, without dropout or counters.
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    batch = Batch(
        tokens,
        tokens,
        torch.ones(tokens.shape),
        positions,
        sample_ids=tuple(range(len(tokens))),
        training=False,
        token_types=torch.zeros_like(tokens) if model.model == "bert" else None,
        ledger=DISCARDING,
    )
    # Padding of the vocabulary is cut off.
    # The last layer of a BERT returns no tensor.
    output = cast(
        torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
        run_layers(modules, None, batch),
    )
    others = []
    if isinstance(output, tuple):
        logits, order = output
        others = [] if order is None else [order]
    else:
        logits = output
    assert isinstance(logits, torch.Tensor), "only a run asks for logits in chunks"
    return [logits.transpose(0, 1)[..., : model.vocab_size].float(), *others]


@torch.inference_mode()
def their_outputs(folder: Path, tokens: torch.Tensor) -> Outputs:
    """Return the outputs of transformers' model in the folder. Raises CheckpointError if it is not installed or
    cannot load the folder."""
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            str(missing_package("--verify", "transformers", "hf", error))
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        is_bert = config.model_type == "megatron-bert"
        kind = (
            transformers.AutoModelForPreTraining
            if is_bert
            else transformers.AutoModelForCausalLM
        )
        model = kind.from_pretrained(folder, attn_implementation="eager").float().eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    output = model(tokens)
    return (
        [output.prediction_logits, output.seq_relationship_logits]
        if is_bert
        else [output.logits]
    )


def outputs_of(checkpoint: LogicalCheckpoint, tokens: torch.Tensor) -> Outputs:
    """Return the outputs of a checkpoint: by transformers if it is a folder of Hugging Face, else by our model."""
    if HUGGING_FACE.detect(checkpoint.folder):
        return their_outputs(checkpoint.folder, tokens)
    return our_outputs(checkpoint, tokens)


def largest_difference(
    some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Return (largest absolute difference, largest absolute value). Raises CheckpointError for other shapes."""
    if [t.shape for t in some] != [t.shape for t in others]:
        raise CheckpointError(
            f"the outputs have shapes {[list(t.shape) for t in some]} and "
            f"{[list(t.shape) for t in others]}: the models differ."
        )
    return (
        max(float((a - b).abs().max()) for a, b in zip(some, others)),
        max(float(a.abs().max()) for a in some),
    )
