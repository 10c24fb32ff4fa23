"""The cache of latents: its bytes, read from the tensors that are kept, and the texts that it gives."""

import pytest

from megatron_ds.extensions.generation.cached_keys import CachedKeys
from megatron_ds.extensions.generation.requests import GenerationRequest, Sampling
from megatron_ds.extensions.latent_attention.latent_attention import LatentAttention
from tests.generation.test_generator import on_layout, prompts

pytestmark = [pytest.mark.threads, pytest.mark.one_in(4, together=True)]

# Heads and latents of DeepSeek-V3, in a narrow model.
OF_V3 = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--q-lora-rank 16 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear"
)
HEADS, PLACES = 4, 17
REQUESTS = 5


def keeps_keys_and_values(self, x, batch):
    """Generation without latents: the keys and values of all heads are kept."""
    return batch.past.attend(
        self.name, self.core_attention, *self.heads(x, batch), batch
    )


def kept(generator) -> set[float]:
    """Numbers of a token that each layer keeps on this rank, by the memory of its tensors."""
    layers = generator._cached._layers
    places = (REQUESTS + 1) * PLACES
    numbers = set()
    for tensors in layers.values():
        memory = {t.untyped_storage().data_ptr(): t for t in tensors}
        elements = [t.untyped_storage().nbytes() / t.itemsize for t in memory.values()]
        numbers.add(sum(elements) / places)
    assert len(layers) == 4
    return numbers


def generated(layout: str, *flags: str) -> tuple[list[list[int]], set[float], int]:
    """(the texts of prompts of several lengths, numbers kept of a token, bytes of one)"""

    def work(generator, _):
        asked = [GenerationRequest(tokens, Sampling(0.0), 6) for tokens in prompts()]
        texts = generator.run(asked)
        of_first = next(iter(generator._cached._layers.values()))
        tokens = [[token.token for token in text] for text in texts]
        return tokens, kept(generator), of_first[0].itemsize

    limits = {"requests": REQUESTS, "length": PLACES}
    return on_layout(layout, " ".join((OF_V3, *flags)), work, **limits)


@pytest.mark.parametrize("layout, ranks", [("dp=1", 1), ("tp=2,sp=1", 2)])
def test_a_token_takes_576_numbers_and_gives_the_texts_of_kept_keys_and_values(
    layout, ranks, monkeypatch
):
    texts, numbers, size = generated(layout)
    assert numbers == {576} and size == 4
    monkeypatch.setattr(LatentAttention, "generated", keeps_keys_and_values)
    others, numbers, _ = generated(layout)
    assert numbers == {HEADS // ranks * (128 + 64 + 128)}
    assert texts == others
    assert len({tuple(text) for text in texts}) > 3


def test_the_cache_is_in_the_dtype_of_the_run():
    _, numbers, size = generated("dp=1", "--bf16")
    assert numbers == {576} and size == 2


def test_adapters_of_the_projections_to_latents_keep_the_latents():
    """One of the projection from the latents makes keys and values what is kept."""
    adapted = (
        "--lora-rank 2 --lora-target-modules linear_q_down_proj linear_kv_down_proj"
    )
    texts, _, _ = generated("dp=1")
    # The initial adapters change nothing.
    assert generated("tp=2", adapted)[:2] == (texts, {576})
    others, numbers, _ = generated("tp=2", f"{adapted} linear_kv_up_proj")
    assert others == texts and numbers == {HEADS // 2 * (128 + 64 + 128)}


def test_texts_depend_on_the_latents_that_are_kept(monkeypatch):
    """A cache that loses what it is given would show in the tokens."""
    texts, _, _ = generated("dp=1")
    write = CachedKeys.write

    def lost(self, name, k, v, places):
        return write(self, name, k * 0, v, places)

    monkeypatch.setattr(CachedKeys, "write", lost)
    assert generated("dp=1")[0] != texts
