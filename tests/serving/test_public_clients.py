"""Clients of others work unchanged: OpenAI's package, and the API models of lm-evaluation-harness."""

import pytest

from tests.harness.toy_generator import ToyGenerator, scores_after, serving

pytestmark = pytest.mark.threads

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served():
    with serving(ToyGenerator(max_length=300)) as running:
        yield running


def test_openais_client_reads_all_answers(served):
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.OpenAI(base_url=f"{served.service.url}/v1", api_key="none")
    (model,) = client.models.list()
    asked = {"model": model.id, "max_tokens": 12, "temperature": 0}
    # Completions, whole and as a stream.
    whole = client.completions.create(**asked, prompt="Once", logprobs=2, n=2)
    first = whole.choices[0]
    assert first.text == whole.choices[1].text and whole.usage.prompt_tokens == 4
    assert len(first.logprobs.tokens) == whole.usage.completion_tokens / 2
    parts = client.completions.create(**asked, prompt="Once", stream=True)
    assert "".join(part.choices[0].text for part in parts) == first.text
    # Chat.
    answer = client.chat.completions.create(
        **asked, messages=HI, logprobs=True, top_logprobs=1
    )
    content = answer.choices[0].message.content
    assert answer.choices[0].logprobs.content
    chunks = client.chat.completions.create(**asked, messages=HI, stream=True)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == content
    # Errors have the classes of the client.
    with pytest.raises(openai.BadRequestError, match="best_of 2") as caught:
        client.completions.create(**asked, prompt="a", best_of=2)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_the_evaluation_harness_gets_the_models_log_probabilities(served, tmp_path):
    pytest.importorskip(
        "lm_eval", reason="lm_eval, of the extra eval, is not installed"
    )
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoTokenizer

    from tests.harness.byte_tokenizer import save_tokenizer

    save_tokenizer(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    encode = lambda text: words.encode(text, add_special_tokens=False)
    model = LocalCompletionsAPI(
        model="toy",
        base_url=f"{served.service.url}/v1/completions",
        tokenizer=str(tmp_path),
        tokenizer_backend="huggingface",
        max_length=200,
    )
    texts = [("The cat", " sat"), ("1, 2,", " 3"), greedy_pair(words, encode)]
    found = model.loglikelihood([Instance("loglikelihood", {}, t, 0) for t in texts])
    for (context, continuation), (total, is_greedy) in zip(texts, found, strict=True):
        tokens = encode(context + continuation)
        start = len(encode(context))
        scores = [scores_after(tokens[:i], 258) for i in range(start, len(tokens))]
        pairs = list(zip(scores, tokens[start:], strict=True))
        assert total == pytest.approx(sum(row[token] for row, token in pairs))
        assert is_greedy == all(row[token] == max(row) for row, token in pairs)
    assert [is_greedy for _, is_greedy in found] == [False, False, True]


def greedy_pair(words, encode):
    """A context, and its likeliest continuation of one token."""
    for number in range(1000):
        context = f"text {number}"
        scores = scores_after(encode(context), 258)
        best = words.decode([scores.index(max(scores))])
        if best.isascii() and best.isalnum():
            return context, best
    raise AssertionError
