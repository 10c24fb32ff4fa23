"""Evaluations of a folder of Hugging Face: log-probabilities and answers are those of transformers, and of
lm-evaluation-harness on it, at every layout."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.extensions.evaluation.bundled_tasks import BUNDLED
from megatron_ds.extensions.evaluation.checkpoint_model import (
    evaluation_config,
    load_model,
)
from megatron_ds.extensions.evaluation.harness import HarnessRun, HarnessTasks
from megatron_ds.extensions.evaluation.leading_rank import lead
from megatron_ds.extensions.evaluation.score_plan import ScoreRequest
from megatron_ds.extensions.evaluation.scorer import Scorer
from megatron_ds.mpu.launch_facts import Launch
from megatron_ds.mpu.mesh import Mesh
from tests.harness.byte_tokenizer import BEGIN, END, save_tokenizer
from tests.harness.huggingface_models import saved
from tests.harness.layout_comparison import parse_layout
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.one_in(10)]

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)

ROWS, POSITIONS = 259, 96
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=ROWS,
    max_position_embeddings=POSITIONS,
    initializer_range=0.3,
    bos_token_id=BEGIN,
    eos_token_id=END,
)
MODELS = {
    "gpt2": ("GPT2", SIZES),
    "llama": ("Llama", SIZES),
    "mixtral": ("Mixtral", SIZES | dict(num_local_experts=4, sliding_window=None)),
    "granite": ("Granite", SIZES | dict(residual_multiplier=0.4, logits_scaling=0.6)),
    "cohere2": ("Cohere2", SIZES | dict(logit_scale=0.8, sliding_window=7)),
    "glm4_moe": (
        "Glm4Moe",
        SIZES
        | dict(n_routed_experts=4, moe_intermediate_size=16, num_experts_per_tok=2),
    ),
}
STATES = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    head_dim=8,
)
MAMBA = dict(mamba_n_heads=8, mamba_n_groups=4, mamba_d_state=10, pad_token_id=0)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
)
# Models that texts are continued with, whose layers have states, or keep latents.
MODELS |= {
    "deepseek_v2": ("DeepseekV2", SIZES | LATENT | dict(head_dim=4)),
    "deepseek_v3": ("DeepseekV3", SIZES | LATENT | dict(n_group=2, topk_group=1)),
    "qwen3_next": (
        "Qwen3Next",
        SIZES
        | STATES
        | dict(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
        ),
    ),
    "qwen3_5": ("Qwen3_5Text", SIZES | STATES),
    "olmo_hybrid": (
        "OlmoHybrid",
        SIZES
        | {n: v for n, v in STATES.items() if n != "head_dim"}
        | dict(pad_token_id=0),
    ),
    "bamba": ("Bamba", SIZES | MAMBA | dict(attn_layer_indices=[1])),
    "falcon_h1": (
        "FalconH1",
        SIZES
        | MAMBA
        | dict(
            mamba_d_ssm=48,
            key_multiplier=0.4,
            ssm_multipliers=[0.4, 0.3, 0.7, 1.2, 0.3],
        ),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        SIZES
        | MAMBA
        | dict(
            num_local_experts=4,
            shared_intermediate_size=24,
            layer_types=["mamba", "mamba", "attention", "mamba"],
        ),
    ),
    "mamba2": (
        "Mamba2",
        dict(
            hidden_size=32,
            num_hidden_layers=3,
            vocab_size=ROWS,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            state_size=10,
            initializer_range=0.3,
            bos_token_id=BEGIN,
            eos_token_id=END,
        ),
    ),
    "nemotron_h": (
        "NemotronH",
        SIZES
        | dict(
            layers_block_type=["mamba", "mlp", "attention", "mamba"],
            head_dim=8,
            mamba_num_heads=8,
            mamba_head_dim=6,
            n_groups=4,
            ssm_state_size=10,
        ),
    ),
}
LAYOUTS = [
    ("llama", layout)
    for layout in (
        "dp=1",
        "dp=2",
        "dp=3,zero=3",
        "tp=2",
        "tp=4,sp=1",
        "pp=2",
        "pp=4",
        "pp=2,chunks=2,schedule=interleaved",
        "cp=2",
        "cp=4,comm_type=a2a",
        "tp=2,pp=2",
        "tp=2,pp=2,zero=3,dp=2",
        "pp=2,cp=2,dp=2",
        "tp=2,pp=2,cp=2,sp=1",
    )
] + [
    ("mixtral", layout)
    for layout in (
        "dp=1",
        "dp=2,ep=2",
        "dp=4,ep=4,zero=3",
        "tp=2,dp=2,ep=2",
        "pp=2,dp=2,ep=2",
        "pp=2,cp=2,tp=2,ep=2,sp=1",
    )
]
# Of these log-probabilities alone are compared. Delta nets of these sizes have tokens whose norm divides by nearly 0:
# transformers' own results in fp32 are 4e-4 from those in fp64. Texts that they continue are compared instead.
OTHERS = [
    ("bamba", "tp=2,sp=1"),
    ("falcon_h1", "dp=2,zero=3"),
    ("bamba", "cp=2,comm_type=a2a"),
    ("nemotron_h", "pp=2"),
    ("deepseek_v3", "tp=2,cp=2,sp=1"),
]


@functools.cache
def folder_of(name):
    """A model with random weights and its tokenizer, as transformers saves them."""
    import tempfile
    from pathlib import Path

    kind, sizes = MODELS[name]
    folder = Path(tempfile.mkdtemp(prefix="harness-"))
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@functools.cache
def theirs(name):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(name))
    return model.float().eval()


def at_layout(name, layout, work):
    """`work(model)` of every rank of a layout that has loaded the folder."""
    wanted = parse_layout(layout, mbs="2")
    flags = ["--load", str(folder_of(name)), *wanted.flags]
    config = evaluation_config(flags, Launch(world_size=wanted.world_size))

    def main(rank, world):
        grid = config.grid(wanted.world_size)
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        return work(load_model(config, mesh))

    return run_ranks(wanted.world_size, main)


def texts():
    draw = torch.Generator().manual_seed(5)
    lengths = (2, 3, 17, 40, POSITIONS, POSITIONS + 1)
    return [torch.randint(ROWS, (n,), generator=draw).tolist() for n in lengths]


def test_the_dtype_is_that_of_the_weights_unless_a_flag_gives_one(tmp_path, caplog):
    flags = ["--load", str(saved("llama", tmp_path, torch.bfloat16))]
    names = {"--no-bf16": "float32", "--fp16": "float16", "--seed=1": "bfloat16"}
    for flag, name in names.items():
        with caplog.at_level("INFO"):
            config = evaluation_config([*flags, flag], Launch(world_size=1))
        assert config.optimizer.params_dtype == name
    assert caplog.text.count("computes in bf16, as its checkpoint does") == 1


@pytest.mark.parametrize("name, layout", LAYOUTS + OTHERS)
def test_log_probabilities_are_those_of_transformers(name, layout):
    requests = [ScoreRequest(tuple(ids), len(ids) - 1) for ids in texts()]
    for of_rank in at_layout(name, layout, lambda m: Scorer(m.replica).score(requests)):
        for ids, found in zip(texts(), of_rank, strict=True):
            with torch.no_grad():
                logits = theirs(name)(torch.tensor([ids[:-1]])).logits[0]
            log_probs = logits.log_softmax(-1)
            expected = log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            torch.testing.assert_close(found.log_probs, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(found.likeliest, logits.argmax(-1))


# ------------------------------------------------------------------ with lm-evaluation-harness
def instance(*arguments):
    return SimpleNamespace(args=arguments)


PAIRS = [
    instance("The opposite of hot is", " cold"),
    instance("Blanks move ", "to the continuation"),
    instance("", "no context"),
    instance("x" * 150, "y" * 20),
    instance("a", "z" * (POSITIONS - 1)),
]
LONG = [instance(text) for text in ("short", "long " * 60, "q" * (POSITIONS + 1))]
OPTIONS = {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False}
PROMPTS = [instance(text, OPTIONS) for text in ("One", "two and " * 30, "")]


@functools.cache
def answers_of_the_harness(name):
    """What its own model for transformers gives."""
    pytest.importorskip(
        "lm_eval", reason="lm_eval, of the extra eval, is not installed"
    )
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    folder = folder_of(name)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = HFLM(pretrained=theirs(name), tokenizer=words, batch_size=3)
    found = evaluate(model, loaded_tasks(), bootstrap_iters=0, log_samples=False)
    return answers(model) | {"tasks": numbers(found["results"])}


def loaded_tasks():
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_defaults=False).load([f() for f in BUNDLED.values()])
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    return loaded


def answers(model):
    return {
        "pairs": model.loglikelihood(PAIRS),
        "rolling": model.loglikelihood_rolling(LONG),
        "texts": model.generate_until(PROMPTS),
    }


def numbers(results):
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, float)
        }
        for task, metrics in results.items()
    }


def ours(model):
    """The same answers of this package, which only the first rank asks for."""
    from megatron_ds.extensions.evaluation.harness_model import HarnessModel

    scorer = Scorer(model.replica)
    ask = lambda score: answers(HarnessModel(score, model.tokenizer, scorer.max_length))
    found = lead(scorer, ask)
    tasks = HarnessTasks(tuple(BUNDLED))
    results = HarnessRun(scorer, model.tokenizer, tasks).results()
    return found | {"tasks": numbers(results)}


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_answers_are_those_of_the_harness_on_the_folder(name, layout):
    expected = answers_of_the_harness(name)
    for found in at_layout(name, layout, ours):
        close = functools.partial(pytest.approx, rel=1e-5, abs=1e-5)
        totals, greedy = zip(*found["pairs"])
        wanted_totals, wanted_greedy = zip(*expected["pairs"])
        assert totals == close(wanted_totals)
        assert greedy == wanted_greedy
        assert found["rolling"] == close(expected["rolling"])
        assert found["texts"] == expected["texts"]
        assert found["tasks"].keys() == expected["tasks"].keys()
        for task, values in expected["tasks"].items():
            assert found["tasks"][task] == close(values)


YAML = """task: of_a_user
dataset_path: json
dataset_kwargs:
  data_files: {test: "FOLDER/items.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
"""


def test_a_task_of_a_user_is_evaluated_from_its_files(tmp_path, monkeypatch):
    pytest.importorskip(
        "lm_eval", reason="lm_eval, of the extra eval, is not installed"
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = [
        {"question": "2 + 2 is", "choices": [" 4", " five"], "gold": number % 2}
        for number in range(6)
    ]
    lines = "\n".join(json.dumps(item) for item in items)
    (tmp_path / "items.jsonl").write_text(lines)
    (tmp_path / "mine.yaml").write_text(YAML.replace("FOLDER", str(tmp_path)))
    wanted = HarnessTasks(("of_a_*",), str(tmp_path), limit=4)

    def work(model):
        return HarnessRun(Scorer(model.replica), model.tokenizer, wanted).results()

    (found,) = at_layout("llama", "dp=1", work)
    assert found["of_a_user"]["acc"] == 0.5 and found["of_a_user"]["sample_len"] == 4
