"""`BlockOptions`: the part of `ModelConfig` about the norms, the biases and the sums of a block."""

from dataclasses import dataclass

from .need import need
from .option import option


@dataclass(frozen=True)
class BlockOptions:
    """What differs between published models beside sizes, attention and experts."""

    use_parallel_residual: bool = option(
        False,
        help="Attention and the feed-forward of a block both read its input, each through its own "
        "norm, and their outputs are added to it (GPT-J, GPT-NeoX).",
        avoid="It is for models that were trained so; elsewhere it costs a little quality.",
    )
    shared_block_norm: bool = option(
        False,
        needs=need("model.use_parallel_residual"),
        help="With --use-parallel-residual, attention and the feed-forward read one norm of the block's input "
        "(GPT-J, Falcon-7B, Phi-2).",
        avoid="It is for models that were trained so.",
    )
    norm_after_sublayer: bool = option(
        False,
        help="Normalize the outputs of attention and of the feed-forward, too, before they are added to the "
        "hidden states (Gemma 2 and 3).",
        avoid="Two more norms in each block.",
    )
    use_bias_in_attn_linear: bool = option(
        True,
        switches={"--disable-bias-in-attn-linear": False},
        help="Give the linear layers of attention biases, where linear layers have them (GPT-J has none).",
    )
    use_bias_in_norms: bool = option(
        True,
        switches={"--disable-bias-in-norms": False},
        needs=need("model.normalization", "LayerNorm"),
        help="Give LayerNorm biases (MPT has none).",
    )
    output_layer_bias: bool = option(
        False,
        help="Give the output layer over the vocabulary a bias (GPT-J, Phi-2). That of masked tokens always has it.",
        avoid="It is for models that were trained so.",
    )
    final_logit_softcapping: float | None = option(
        None,
        above=0,
        help="C: the logits become C tanh(logits / C), in training and whenever tokens are scored or chosen "
        "(30 in Gemma 2).",
        avoid="It is for models that were trained so.",
    )
    embedding_multiplier: float = option(
        1.0,
        above=0,
        help="Factor of the word embeddings, of the input only (Gemma: the root of the hidden size).",
        avoid="It is for models that were trained so; --init-method-std sets the size of new embeddings.",
    )
    residual_multiplier: float = option(
        1.0,
        above=0,
        help="Factor of the outputs of attention and of the feed-forward, before they are added to the hidden states "
        "(0.22 in Granite 3).",
        avoid="It is for models that were trained so.",
    )
    logit_multiplier: float = option(
        1.0,
        above=0,
        help="Factor of the product of the hidden states with the vocabulary, which are the logits without "
        "--output-layer-bias (0.0625 in Command R, 1/16 in Granite 3).",
        avoid="It is for models that were trained so; --temperature scales the logits of generation alone.",
    )
