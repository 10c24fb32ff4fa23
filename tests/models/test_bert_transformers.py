"""Our BERT is the one of the transformers library: MegatronBertForPreTraining, with the same weights."""

import pytest
import torch

from megatron_ds.batch.ledger import Ledger
from megatron_ds.config.options.model import ModelConfig
from megatron_ds.models import MODELS, build_stage, run_layers
from megatron_ds.mpu.group import solo
from tests.harness.bert_runs import random_bert_batch
from tests.harness.model_runs import context_of
from tests.harness.plain_bert import bert_weights
from tests.harness.plain_gpt import load_logical

pytestmark = pytest.mark.threads

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)

V, H, N, L, S = 50, 24, 3, 2, 12


def theirs(weights):
    config = transformers.MegatronBertConfig(
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=L,
        num_attention_heads=N,
        intermediate_size=4 * H,
        hidden_act="gelu_new",
        max_position_embeddings=S,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
    )
    model = transformers.MegatronBertForPreTraining(config).double()
    names = {
        "embedding.word_embeddings.weight": "bert.embeddings.word_embeddings.weight",
        "embedding.position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
        "embedding.tokentype_embeddings.weight": "bert.embeddings.token_type_embeddings.weight",
        "output_layer.bias": "cls.predictions.bias",
    }
    modules = {
        "encoder.final_layernorm": "bert.encoder.ln",
        "pooler.dense": "bert.pooler.dense",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "binary_head": "cls.seq_relationship",
    }
    for i in range(L):
        ours, other = f"encoder.layers.{i}", f"bert.encoder.layer.{i}"
        modules |= {
            f"{ours}.input_layernorm": f"{other}.attention.ln",
            f"{ours}.pre_mlp_layernorm": f"{other}.ln",
            f"{ours}.self_attention.linear_proj": f"{other}.attention.output.dense",
            f"{ours}.mlp.linear_fc1": f"{other}.intermediate.dense",
            f"{ours}.mlp.linear_fc2": f"{other}.output.dense",
        }
    state = {}
    for name, value in weights.items():
        module, leaf = name.rsplit(".", 1)
        if module.endswith("linear_qkv"):
            rows = value.unflatten(
                0, (N, 3, H // N)
            )  # by head: its query, key and value
            layer = module.split(".")[2]
            for at, part in enumerate(("query", "key", "value")):
                state[f"bert.encoder.layer.{layer}.attention.self.{part}.{leaf}"] = (
                    rows[:, at].flatten(0, 1)
                )
        else:
            state[names.get(name) or f"{modules[module]}.{leaf}"] = value
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(
        name.startswith("cls.predictions.decoder") or "position_ids" in name
        for name in missing
    )
    model.tie_weights()
    return model.eval()


def test_outputs_and_losses_are_those_of_megatron_bert_in_transformers():
    config = ModelConfig(
        model="bert",
        num_layers=L,
        hidden_size=H,
        num_attention_heads=N,
        seq_length=S,
        vocab_size=V,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        make_vocab_size_divisible_by=8,
    )
    weights, batch = bert_weights(config, seed=5), random_bert_batch(V, (3, 4, 5), S)
    model = build_stage(MODELS["bert"](config, context_of()))
    load_logical(model.parameters(), weights, solo())
    output = run_layers(model, None, batch)
    logits = output.logits[..., :V].transpose(0, 1).detach().clone()
    labels = batch.labels.where(batch.loss_mask > 0, -100)
    reference = theirs(weights)(
        batch.tokens,
        attention_mask=(~batch.attention_mask[:, 0, 0]).long(),
        token_type_ids=batch.token_types,
        labels=labels,
        next_sentence_label=batch.sentence_order,
    )
    # fp32 against fp64
    torch.testing.assert_close(
        logits.double(), reference.prediction_logits, rtol=1e-5, atol=2e-5
    )
    torch.testing.assert_close(
        output.order.double(), reference.seq_relationship_logits, rtol=1e-5, atol=1e-5
    )
    ledger = Ledger()
    loss = MODELS["bert"].loss(
        output, batch.with_ledger(ledger), tp=solo(), vocab_size=V
    )
    ledger.close()
    [order] = ledger.take()
    objective = loss.objective + order.weight * order.value / order.count
    assert objective.item() == pytest.approx(reference.loss.item(), rel=1e-5)
