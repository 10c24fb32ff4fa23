"""`ops.sparse_attention`: layouts equal DeepSpeed's bit by bit; attention equals masked dense attention."""

import hashlib
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron_ds.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
)
from torch import nn

from megatron_ds.errors import ConfigError
from megatron_ds.ops import sparse_attention

pytestmark = pytest.mark.plan

UNI = "unidirectional"
BI = "bidirectional"
BOTH = (False, True)
# class → values of its arguments, of which all combinations are tried
GRIDS = {
    "DenseSparsityConfig": dict(different_layout_per_head=BOTH),
    "FixedSparsityConfig": dict(
        different_layout_per_head=BOTH,
        num_local_blocks=(1, 4, 6),
        num_global_blocks=(1, 2, 3, 4),
        attention=(UNI, BI),
        horizontal_global_attention=BOTH,
        num_different_global_patterns=(1, 2, 4),
    ),
    "VariableSparsityConfig": dict(
        different_layout_per_head=BOTH,
        num_random_blocks=(0, 3),
        local_window_blocks=([4], [1, 2, 3]),
        global_block_indices=([0], [2, 5], [-1], [9]),
        global_block_end_indices=(None, [2], [4, 7]),
        attention=(UNI, BI),
        horizontal_global_attention=BOTH,
    ),
    "BigBirdSparsityConfig": dict(
        different_layout_per_head=BOTH,
        num_random_blocks=(0, 1, 3),
        num_sliding_window_blocks=(1, 2, 5),
        num_global_blocks=(1, 2),
        attention=(UNI, BI),
    ),
    "BSLongformerSparsityConfig": dict(
        different_layout_per_head=BOTH,
        num_sliding_window_blocks=(1, 2, 5),
        global_block_indices=([0], [2, 5], [9]),
        global_block_end_indices=(None, [2], [4, 7]),
        attention=(UNI, BI),
    ),
    "LocalSlidingWindowSparsityConfig": dict(
        num_sliding_window_blocks=(1, 2, 3, 5), attention=(UNI, BI)
    ),
}
# class → `digest` of DeepSpeed 0.14.4's. To make them, from the folder with its sources:
#   python -c "import runpy, sys; t = runpy.run_path('TEST'); m = type('', (), runpy.run_path(
#   'deepspeed/ops/sparse_attention/sparsity_config.py')); [print(n, t['digest'](m, n)) for n in t['GRIDS']]"
DIGESTS = {
    "DenseSparsityConfig": "b8c0ca4f7afdfac9",
    "FixedSparsityConfig": "7001f0c4f336e0e1",
    "VariableSparsityConfig": "c54cc89891ca7580",
    "BigBirdSparsityConfig": "4d0b1bf3d2b8f8d4",
    "BSLongformerSparsityConfig": "2bbcc0cf87a962f6",
    "LocalSlidingWindowSparsityConfig": "319b32e8c39060f2",
}


def digest(module, name):
    """A hash of the layouts of all combinations and some lengths, and of which of them raise ValueError."""
    found = hashlib.sha256()
    names, values = zip(*GRIDS[name].items())
    for chosen in itertools.product(*values):
        for length in (8, 24, 64, 104):
            random.seed(5)
            found.update(layout_bytes(module, name, dict(zip(names, chosen)), length))
    return found.hexdigest()[:16]


def layout_bytes(module, name, options, length):
    try:
        made = getattr(module, name)(num_heads=4, block=8, **options)
        return made.make_layout(length).numpy().tobytes()
    except ValueError:
        return b"refused"


@pytest.mark.parametrize("name", GRIDS)
def test_layouts_are_those_of_deepspeed(name):
    assert digest(sparse_attention, name) == DIGESTS[name]


def qkv(heads=4, length=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, heads, length, 8, generator=generator).requires_grad_()
        for _ in range(3)
    ]


def dense(q, k, v, layout, block, bias=0.0):
    """Softmax over all pairs, those of closed blocks at minus infinity."""
    seen = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
    return scores.masked_fill(seen == 0, -torch.inf).softmax(-1) @ v


def outcome(out, inputs):
    weight = torch.arange(out.numel()).reshape(out.shape).sin()
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


CONFIGS = [
    FixedSparsityConfig(4, 8),
    FixedSparsityConfig(
        4, 8, different_layout_per_head=True, num_different_global_patterns=4
    ),
    BigBirdSparsityConfig(4, 8, different_layout_per_head=True, attention=UNI),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("length", (64, 40))
def test_attention_is_masked_dense_attention(config, length):
    module = SparseSelfAttention(config, max_seq_length=64)
    inputs = qkv(length=length)
    want = dense(*inputs, module.get_layout(length), 8)
    out = module(*inputs)
    for got, expected in zip(outcome(out, inputs), outcome(want, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_masks_are_added_or_hide_and_positions_are_added():
    config = FixedSparsityConfig(4, 8)
    q, k, v = qkv()
    generator = torch.Generator().manual_seed(2)
    rpe = torch.randn(2, 4, 64, 64, generator=generator)
    padding = torch.ones(2, 64)
    padding[1, 50:] = 0
    pairs = torch.ones(64, 64).tril()
    hidden = torch.zeros(2, 1, 64, 64)
    hidden = hidden.masked_fill(padding[:, None, None] == 0, -10000.0)
    want_bias = rpe + hidden.masked_fill(pairs == 0, -torch.inf)
    added = (1 - padding) * -10000.0
    module = SparseSelfAttention(config, max_seq_length=64)
    # added padding, multiplied pairs; a key that is transposed already
    out = module(
        q,
        k.transpose(2, 3),
        v,
        rpe=rpe,
        key_padding_mask=added[:, None, None],
        attn_mask=pairs,
    )
    want = dense(q, k, v, module.get_layout(64), 8, want_bias)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    # multiplied padding
    module = SparseSelfAttention(config, "mul", "add", max_seq_length=64)
    out = module(q, k, v, key_padding_mask=padding)
    want = dense(q, k, v, module.get_layout(64), 8, hidden)
    seen = padding[:, None, :, None] > 0
    torch.testing.assert_close(out * seen, want * seen, rtol=1e-4, atol=1e-5)


def test_a_layout_of_a_state_dict_replaces_the_drawn_one():
    one, other = (
        SparseSelfAttention(BigBirdSparsityConfig(4, 8), max_seq_length=64)
        for _ in range(2)
    )
    inputs = qkv()
    other(*inputs)
    one.master_layout.copy_(torch.eye(8, dtype=torch.int64).expand(4, 8, 8))
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(*inputs), one(*inputs))


def test_errors_say_what_does_not_fit():
    module = SparseSelfAttention(FixedSparsityConfig(4, 8), max_seq_length=64)
    with pytest.raises(ConfigError, match="60 tokens does not fit .* blocks of 8"):
        module(*qkv(length=60))
    with pytest.raises(ConfigError, match="2 heads, but the layout is of 4"):
        module(*qkv(heads=2))
    with pytest.raises(ConfigError, match="3 is not a multiple|not a multiple of"):
        FixedSparsityConfig(4, num_local_blocks=4, num_global_blocks=3)
    with pytest.raises(ConfigError, match="mode 'times'"):
        SparseSelfAttention(FixedSparsityConfig(4), "times")


def test_a_program_may_have_a_layout_of_its_own():
    class Diagonal(SparsityConfig):
        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            layout[0] = torch.eye(layout.shape[1])
            return self.check_and_propagate_first_head_layout(layout)

    module = SparseSelfAttention(Diagonal(4, 8), max_seq_length=64)
    q, k, v = qkv()
    windows = [t.unflatten(2, (8, 8)) for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*windows).flatten(2, 3)
    torch.testing.assert_close(module(q, k, v), want, rtol=1e-4, atol=1e-5)


def test_padding_is_undone():
    ids = torch.arange(1, 11).reshape(2, 5)
    pad, longer, mask, types, places, embeds = SparseAttentionUtils.pad_to_block_size(
        4, ids, None, torch.ones_like(ids), torch.arange(5).expand(2, 5), None, 9, None
    )
    assert pad == 3 and embeds is None
    assert longer[0].tolist() == [1, 2, 3, 4, 5, 9, 9, 9]
    assert mask[0].tolist() == [1] * 5 + [0] * 3
    assert types[1].tolist() == [1] * 5 + [0] * 3
    assert places[1].tolist() == [0, 1, 2, 3, 4, 9, 9, 9]
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(pad, longer), ids)
    same = SparseAttentionUtils.pad_to_block_size(
        5, ids, None, None, None, None, 0, None
    )
    assert same[:2] == (0, ids) and torch.equal(
        SparseAttentionUtils.unpad_sequence_output(0, ids), ids
    )
    table = nn.Embedding(10, 2)
    *_, embeds = SparseAttentionUtils.pad_to_block_size(
        4, None, torch.ones(2, 5), None, None, table(ids[:, :5] % 10), 3, table
    )
    assert torch.equal(embeds[0, -1], table.weight[3])


def test_bert_attention_has_projections():
    config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
    module = BertSparseSelfAttention(config, FixedSparsityConfig(4, 8))
    x = torch.randn(2, 64, 32)
    heads = [
        p(x).unflatten(-1, (4, 8)).transpose(1, 2)
        for p in (module.query, module.key, module.value)
    ]
    layout = module.sparse_self_attention.get_layout(64)
    want = dense(*heads, layout, 8).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ("bert", "roberta"))
def test_a_model_of_hugging_face_becomes_sparse_and_longer(name):
    """A layout that has all blocks changes nothing; positions are repeated."""
    transformers = pytest.importorskip("transformers")
    kind = {"bert": "Bert", "roberta": "Roberta"}[name]
    reserved = {"bert": 0, "roberta": 2}[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=16 + reserved,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    ids = torch.randint(3, 50, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    want = [model(ids).logits, model(ids, attention_mask=mask).logits[:, :10]]
    old = getattr(model, name).embeddings.position_embeddings.weight.detach().clone()
    # Sparse, with all blocks.
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 16, sparse_attention.DenseSparsityConfig(4, 8)
    )
    got = [model(ids).logits, model(ids, attention_mask=mask).logits[:, :10]]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # Longer, also by a part of the first length.
    SparseAttentionUtils.extend_position_embedding(model, 40)
    table = getattr(model, name).embeddings.position_embeddings.weight
    assert len(table) == model.config.max_position_embeddings == 40 + reserved
    assert torch.equal(table[: 16 + reserved], old)
    assert torch.equal(table[16 + reserved : 32 + reserved], old[reserved:])
    assert model(torch.randint(3, 50, (2, 40))).logits.shape == (2, 40, 50)
    with pytest.raises(ConfigError, match="has 40 positions already"):
        SparseAttentionUtils.extend_position_embedding(model, 40)
    with pytest.raises(ConfigError, match="Linear has none of the attributes"):
        SparseAttentionUtils.extend_position_embedding(nn.Linear(1, 1), 40)
