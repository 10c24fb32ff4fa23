"""`SparseAttentionUtils`: DeepSpeed's functions that give a model of Hugging Face, BERT or RoBERTa, longer
sequences and sparse attention.

    model = SparseAttentionUtils.extend_position_embedding(model, 4096)
    model = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 4096, FixedSparsityConfig(num_heads=12))
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import ConfigError
from .sparse_attention import BertSparseSelfAttention
from .sparsity_configs import SparsityConfig

# the encoder's attribute of a model → rows of its position embedding before that of the first token
RESERVED = {"bert": 0, "roberta": 2}
# of the embeddings: one row with an element for each position
TABLES = ("position_ids", "token_type_ids")


Padded = torch.Tensor | None


class SparseAttentionUtils:
    """Functions, as in DeepSpeed: they change a model in place and return it."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Repeat the position embedding until it has `max_position` tokens.

        Raises ConfigError unless the model has fewer, and is of BERT or RoBERTa.
        """
        encoder, reserved = _encoder(model)
        config: Any = model.config
        embeddings = encoder.embeddings
        table = embeddings.position_embeddings
        weight = table.weight.data
        tokens = len(weight) - reserved
        if max_position <= tokens:
            raise ConfigError(
                f"extend_position_embedding(max_position={max_position}): the model has {tokens} positions already."
            )
        # Rows of tokens, one after another.
        repeated = reserved + torch.arange(max_position, device=weight.device) % tokens
        table.weight.data = torch.cat((weight[:reserved], weight[repeated]))
        table.num_embeddings = reserved + max_position
        config.max_position_embeddings = reserved + max_position
        # Buffers with an element for each position.
        for name in TABLES:
            old = getattr(embeddings, name, None)
            if old is not None:
                new = torch.zeros_like(old[:, :1]).repeat(1, reserved + max_position)
                if name == "position_ids":
                    new += torch.arange(reserved + max_position, device=old.device)
                setattr(embeddings, name, new)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set the longest sequence of a tokenizer of Hugging Face."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module,
        max_position: int,
        sparsity_config: SparsityConfig | None = None,
    ) -> nn.Module:
        """Replace the self-attention of all layers by a sparse one with the same projections.

        Raises ConfigError unless the model is an encoder of BERT or RoBERTa.
        """
        encoder, reserved = _encoder(model)
        config: Any = model.config
        if getattr(config, "is_decoder", False):
            raise ConfigError(
                "the model is a decoder (config.is_decoder), whose tokens see earlier ones only: sparse attention "
                "replaces that of encoders."
            )
        config.max_position_embeddings = max_position + reserved
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            config, encoder.encoder.layer, sparsity_config
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any,
        layers: Iterable[Any],
        sparsity_config: SparsityConfig | None = None,
    ) -> Iterable[Any]:
        """Replace `attention.self` of each layer; its query, key and value projections are kept."""
        for layer in layers:
            old = layer.attention.self
            new = _EncoderSelfAttention(config, sparsity_config)
            new.query = old.query
            new.key = old.key
            new.value = old.value
            new.to(old.query.weight.device)
            layer.attention.self = new
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Padded, Padded, Padded, Padded, Padded]:
        """Pad the inputs of a model at the end, to a multiple of the block.

        input_ids, attention_mask, token_type_ids, position_ids  [b, s] or None
        inputs_embeds     [b, s, h] or None; padding is what `model_embeddings` makes of `pad_token_id`
        Returns the length of the padding, and the inputs in this order. Without an attention mask one is made
        where there is padding, so that no token attends to it.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ConfigError(
                "pad_to_block_size: neither input_ids nor inputs_embeds are given, so there is no length to pad. "
                "Give one of them."
            )
        batch, length = given.shape[:2]
        padding = -length % block_size
        if not padding:
            return (
                0,
                input_ids,
                attention_mask,
                token_type_ids,
                position_ids,
                inputs_embeds,
            )
        # What the program left out, and each tensor by its own padding.
        if attention_mask is None:
            attention_mask = given.new_ones((batch, length), dtype=torch.long)
        if inputs_embeds is not None:
            ids = given.new_full((batch, padding), pad_token_id, dtype=torch.long)
            inputs_embeds = torch.cat((inputs_embeds, model_embeddings(ids)), dim=1)
        longer = lambda t, value: (
            None if t is None else F.pad(t, (0, padding), value=value)
        )
        return (
            padding,
            longer(input_ids, pad_token_id),
            longer(attention_mask, 0),
            longer(token_type_ids, 0),
            longer(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(
        pad_len: int, sequence_output: torch.Tensor
    ) -> torch.Tensor:
        """[b, s, h] without the last `pad_len` positions."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


class _EncoderSelfAttention(BertSparseSelfAttention):
    """The module has the call and the result of Hugging Face's self-attention."""

    def forward(  # type: ignore[override]  # the result is that of Hugging Face's layers
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """[b, s, h] → ([b, s, h], no probabilities).

        attention_mask: [b, s] or [b, 1, 1 or s, s], bool (True: seen) or added to scores; its rows are alike
        """
        if attention_mask is not None:
            if attention_mask.dim() == 4:
                attention_mask = attention_mask[:, 0, 0]
            if attention_mask.dtype == torch.bool:
                hidden = torch.zeros(attention_mask.shape, device=hidden_states.device)
                attention_mask = hidden.masked_fill(~attention_mask, -torch.inf)
        return super().forward(hidden_states, attention_mask), None


def _encoder(model: nn.Module) -> tuple[Any, int]:
    """Return the encoder of a model with a head, and its reserved positions. Raises ConfigError for others.

    Encoders are of Hugging Face's classes, which are not imported here.
    """
    for name, reserved in RESERVED.items():
        if hasattr(model, name):
            return getattr(model, name), reserved
    raise ConfigError(
        f"{type(model).__name__} has none of the attributes {', '.join(RESERVED)}: the function changes models of "
        "Hugging Face with a head over one of these encoders. Change other models by their own layers, with "
        "BertSparseSelfAttention or SparseSelfAttention."
    )
