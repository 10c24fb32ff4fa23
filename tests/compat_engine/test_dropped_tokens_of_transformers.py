"""Random-LTD of an engine over layers of transformers, against the same layers called by hand with the kept tokens."""

import copy
import math

import pytest
import torch
from megatron_ds.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from torch import nn
from torch.nn import functional as F

from megatron_ds.errors import ConfigError
from megatron_ds.ops.keyed_random import random_subset
from tests.data_efficiency.test_curriculum_sampler import SEED
from tests.harness.plain_training import train_plainly

from .test_engine_data_efficiency import MICRO, STEPS, engine_of, routing

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.plan

LENGTH = 16
KEPT = 6
DROPPING = (1, 2)  # layers
VOCABULARY = 29
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
UPDATES = 2


def tokens_of(micro_step):
    generator = torch.Generator().manual_seed(micro_step)
    return torch.randint(VOCABULARY, (MICRO, LENGTH), generator=generator)


def kept_of(layer, micro_step):
    """int64 [b, k]: the tokens that the engine's documentation says a layer keeps."""
    key = (SEED, "random_ltd", layer, micro_step, 0)
    keys = [(*key, sample) for sample in range(MICRO)]
    return random_subset(keys, KEPT, LENGTH, torch.device("cpu"))


def loss_of(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def engine_for(model, kind, **changes):
    block = routing(KEPT, LENGTH, steps=10**6, multiple=1, **changes)
    engine, _ = engine_of(model, **block)
    return convert_to_random_ltd(engine, kind)


def train(engine, call):
    losses = []
    for micro_step in range(UPDATES * STEPS):
        tokens = tokens_of(micro_step)
        loss = loss_of(call(engine, tokens), tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_trained_alike(engine, plain, by_hand, losses):
    """The plain model, trained by torch alone, has the engine's losses and weights."""
    found = []

    def loss(module, micro_step):
        tokens = tokens_of(micro_step)
        result = loss_of(by_hand(module, tokens, micro_step), tokens)
        found.append(result.item())
        return result

    steps = [range(first, first + STEPS) for first in range(0, UPDATES * STEPS, STEPS)]
    train_plainly(plain, loss, steps, lr=1e-2, clip=1.0)
    assert losses == pytest.approx(found, rel=1e-5)
    for (name, p), other in zip(plain.named_parameters(), engine.module.parameters()):
        torch.testing.assert_close(other, p, rtol=1e-4, atol=1e-5, msg=name)


# ------------------------------------------------------------------------------------------------ Llama
def llama():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=1, max_position_embeddings=LENGTH
    )
    return transformers.LlamaForCausalLM(config)


def llama_by_hand(padding):
    """A function that runs the layers with the kept tokens, their angles and a mask of their pairs."""

    def run(module, tokens, micro_step):
        decoder = module.model
        x = decoder.embed_tokens(tokens)
        for number, layer in enumerate(decoder.layers):
            places = torch.arange(LENGTH).expand(MICRO, LENGTH)
            if number in DROPPING:
                places = kept_of(number, micro_step)
            rows = torch.arange(MICRO)[:, None]
            # The angles of these places; pairs of a token and an earlier one that is no padding.
            angles = decoder.rotary_emb(x, position_ids=places)
            seen = places[:, :, None] >= places[:, None, :]
            seen = seen & (places < LENGTH - padding)[:, None, :]
            mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None]
            x = x.clone()
            x[rows, places] = layer(
                x[rows, places], attention_mask=mask, position_embeddings=angles
            )
        return module.lm_head(decoder.norm(x))

    return run


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_llama_trains_as_its_layers_called_by_hand(padding, recompute):
    model = llama()
    plain = copy.deepcopy(model)
    if recompute:
        model.gradient_checkpointing_enable()
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    engine = engine_for(model, kind)
    engine.train()
    mask = torch.ones(MICRO, LENGTH, dtype=torch.long)
    mask[:, LENGTH - padding :] = 0
    given = {"attention_mask": mask} if padding else {}
    losses = train(engine, lambda engine, tokens: engine(tokens, **given).logits)
    assert_trained_alike(engine, plain, llama_by_hand(padding), losses)


# ------------------------------------------------------------------------------------------------- BERT
def test_bert_whose_layers_take_the_mask_by_position_trains_as_called_by_hand():
    torch.manual_seed(3)
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **zero))
    plain = copy.deepcopy(model)
    padding = 3

    def by_hand(module, tokens, micro_step):
        x = module.bert.embeddings(input_ids=tokens)
        for number, layer in enumerate(module.bert.encoder.layer):
            places = torch.arange(LENGTH).expand(MICRO, LENGTH)
            if number in DROPPING:
                places = kept_of(number, micro_step)
            rows = torch.arange(MICRO)[:, None]
            seen = (places < LENGTH - padding)[:, None, None, :]
            mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
            x = x.clone()
            x[rows, places] = layer(x[rows, places], mask)
        return module.cls(x)

    kind = transformers.models.bert.modeling_bert.BertLayer
    engine = engine_for(model, kind, model_type="encoder")
    engine.train()
    mask = torch.ones(MICRO, LENGTH, dtype=torch.long)
    mask[:, LENGTH - padding :] = 0
    call = lambda engine, tokens: engine(tokens, attention_mask=mask).logits
    losses = train(engine, call)
    assert_trained_alike(engine, plain, by_hand, losses)


# --------------------------------------------------------------------------------------------- refusals
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states, **given):
        return self.linear(hidden_states)


class Given(nn.Module):
    """Gives its layers one argument besides the hidden states."""

    def __init__(self, name, value):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.given = {name: value}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, **self.given)
        return x


@pytest.mark.parametrize(
    "name, value, changes, says",
    [
        (
            "attention_mask",
            torch.zeros(1, 1, LENGTH, LENGTH),
            {"model_mask_name": None},
            f"a mask of all {LENGTH} .* keeps {KEPT}. Set the key to 'attention_mask'",
        ),
        ("attention_mask", object(), {}, "the mask of a layer is object"),
        (
            "position_embeddings",
            (torch.zeros(LENGTH, 4),) * 2,
            {},
            rf"shape \[{LENGTH}, 4\].*must be \[{MICRO} or 1, {LENGTH}",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(name, value, changes, says):
    engine = engine_for(Given(name, value), Layer, **changes)
    with pytest.raises(ConfigError, match=says):
        engine(torch.zeros(MICRO, LENGTH, 8))
