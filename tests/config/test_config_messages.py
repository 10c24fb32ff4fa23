"""What a user reads when the configuration is wrong.

tests/golden/config_messages.txt is a page of messages, one of each kind, word for word. config_refusals.txt has for
every wrong command the first two flags, keys or files that each of its problems names. After a change run
`python -m tests.config.test_config_messages`, and read the difference as a user would.
"""

import os
import re
from pathlib import Path

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

GOLDEN = Path(__file__).parents[1] / "golden"

MODEL = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257"
RUN = "--micro-batch-size 2 --lr 6e-4"
GOOD = f"{MODEL} {RUN} --train-iters 100 --mock-data"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP = "--expert-model-parallel-size"
SAMPLES = f"{MODEL} {RUN} --mock-data --train-samples"

FILES = {
    "experts.yaml": "num_experts: 8\nmoe_layer_freq: '[0, 1]'\nmoe_router_topk: 9\n",
    "gpt.yaml": "num_layers: 12\nhiden_size: 768\noptimizer:\n  lr: fast\n  hidden_size: 768\n  lr: "
    "6e-4\nswiglu: true\nseed: {a: 1}\n",
    "mock.yaml": "mock_data: true\n",
    "synonyms.yaml": "learning_rate: 1\nmax-steps: 5\nfrobnicate: 1\nno_position_embedding: true\n",
    "off.json": '{"wall_clock_breakdown": false, "zero_optimization": {"contiguous_gradients": true, '
    '"stge": 2}, "wandb": {"enabled": true}, "learning_rate": 1, "optimizer": '
    '{"type": "Adam", "params": {"bias_correction": false}}}',
    "large.yaml": "hidden_size: 1024\nmin_lr: 1e-5\n",
    "broken.yaml": "a: [1, 2\nb: 3\n",
    "other.yaml": "min-lr: 2e-5\n",
    "list.yaml": "- 1\n- 2\n",
    "tab.yaml": "model:\n\tnum_layers: 2\n",
    "small.yaml": "model:\n  hidden_size: 512\nlog_interval: 0\n",
    "ds.json": '{"train_batch_size": "many", "gradient_cliping": 1.0, "fp16": true, "zero_optimization": '
    '{"stage": 1, "contigous_gradients": true, "offload_optimizer": {"device": "cpu"}}}',
    "types.json": '{"optimizer": {"type": "OneBitLamb"}, "scheduler": {"type": "WarmupCosinLR"}, '
    '"wandb": {"enabled": false}}',
    "params.json": '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9], '
    '"momentum": 0.9}}, "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}, '
    '"tensorboard": {"enabled": true}}',
    "triad.json": '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, '
    '"gradient_accumulation_steps": 3}',
    "twice.json": '{"fp16": {"enabled": true, "enabled": false}}',
    "broken.json": '{"fp16": {"enabled": true,,}}',
    "lr.json": '{"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR", '
    '"params": {"warmup_max_lr": 2e-3}}}',
}

CASES = [
    (1, ""),
    *(
        (ranks, f"{GOOD} {extra}")
        for ranks, extra in (
            (1, "--num_lyers 12 --lr fast --bf16 true --seed"),
            (1, "-lr 1e-3 –bf16 —hidden-siz 5 --seed 1"),
            (
                1,
                "--use-flash-attn --data-impl lazy --exit-signal SIGHUP --num-experts 8 --moe-router-topk 2",
            ),
            (
                1,
                "--learning-rate 1 --output-dir out --tp 2 --epochs 3 --compile --gpus 8 --frobnicate",
            ),
            (
                1,
                "--lr fast --num_lyers 3 --fp16 --bf16 --config synonyms.yaml --deepspeed_config off.json",
            ),
            (1, "--local-rank 3"),
            (1, "--local_rank first"),
            (1, "--swiglu --squared-relu"),
            (1, "--activation gulu --hidden-dropout 1 --normalization batchnorm"),
            (1, "--data-path"),
            (4, f"{TP} 3"),
            (8, f"{TP} 8"),
            (16, f"{PP} 16"),
            (2, f"{PP} 2 --pipeline-layout 5,6"),
            (2, f"{TP} 2 --num-query-groups 1 --sequence-parallel --seq-length 1023"),
            (1, "--num-attention-heads 11"),
            (1, "--hidden-size 12 --swiglu"),
            (1, "--num-attention-heads 256 --position-embedding-type rope"),
            (1, "--group-query-attention"),
            (1, "--num-query-groups 5"),
            (1, "--max-position-embeddings 512"),
            (4, "--global-batch-size 10"),
            (3, "--global-batch-size 10"),
            (1, "--gradient-accumulation-steps 3 --global-batch-size 10"),
            (1, "--train-samples 1000 --lr-warmup-samples 10"),
            (1, "--lr-warmup-samples 10 --lr-decay-samples 100"),
            (1, "--lr-warmup-iters 5 --lr-warmup-fraction 0.1"),
            (1, "--lr-decay-style WSD"),
            (1, "--lr-wsd-decay-iters 10"),
            (1, "--lr-warmup-iters 100 --min-lr 1"),
            (1, "--decoupled-lr 1e-6 --min-lr 1e-5"),
            (1, "--decoupled-min-lr 1e-6"),
            (1, "--use-rope-scaling --rotary-interleaved --apply-wd-to-qk-layernorm"),
            (1, "--position-embedding-type rope --rope-scaling-factor 4"),
            (
                1,
                "--position-embedding-type yarn --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            ),
            (1, "--yarn-beta-fast 16 --rotary-ntk-factor 2"),
            (
                1,
                "--position-embedding-type rope --rotary-ntk-factor 2 --original-max-position-embeddings 2048",
            ),
            (
                1,
                "--position-embedding-type rope --rotary-ntk-factor 2 --use-rope-scaling "
                "--yarn-original-max-position-embeddings 512",
            ),
            (1, "--position-embedding-type yarn --original-max-position-embeddings 5"),
            (
                1,
                "--position-embedding-type yarn --original-max-position-embeddings 512 --yarn-beta-fast 1 "
                "--yarn-beta-slow 4",
            ),
            (
                1,
                "--position-embedding-type rope --original-max-position-embeddings 512",
            ),
            (1, "--fp16 --bf16 --loss-scale 1024"),
            (1, "--zero-accumulate full --main-grads-dtype bf16"),
            (1, "--start-weight-decay 0"),
            (1, "--weight-decay-incr-style linear"),
            (1, "--save-interval 10 --exit-on-missing-checkpoint"),
            (1, "--recompute-num-layers 2"),
            (
                1,
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            ),
            (
                1,
                "--checkpoint-in-cpu --distribute-saved-activations --cpu-offloading-num-layers 2 --tiled-logits 4",
            ),
            (
                2,
                f"{TP} 2 --partition-activations --tiled-logits --cross-entropy-chunks 3 --tiled-mlp --num-experts "
                "4",
            ),
            (1, "--zero-stage 2 --zero3-pin-stage --context-parallel-size 2"),
            (1, "--rank-order tp-dp-pp"),
            (1, "--config gpt.yaml"),
            (1, "--config nowhere.yaml"),
            (1, "--config broken.yaml"),
            (1, "--config list.yaml"),
            (1, "--config tab.yaml"),
            (1, "--config small.yaml"),
            (1, "--deepspeed_config ds.json"),
            (1, "--deepspeed_config types.json"),
            (1, "--deepspeed_config params.json"),
            (1, "--deepspeed_config twice.json"),
            (1, "--deepspeed_config broken.json"),
        )
    ),
    *(
        (ranks, words)
        for ranks, words in (
            (1, f"{MODEL} {RUN} --train-iters 100"),
            (1, f"{MODEL} {RUN} --train-iters 100 --data-path corpus"),
            (
                1,
                f"{MODEL} {RUN} --train-iters 100 --data-path corpus --config mock.yaml --tokenizer-type "
                "NullTokenizer",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-tokens 1e6 --lr-warmup-samples 10 --lr-decay-tokens 1e6 --mock-data",
            ),
            (1, f"{MODEL} {RUN} --train-tokens 1e6 --lr-warmup-samples 10 --mock-data"),
            (
                1,
                f"{MODEL} {RUN} --train-tokens 1e6 --lr-warmup-tokens 2e6 --lr-decay-style cosine --mock-data",
            ),
            (1, f"{MODEL} {RUN} --train-iters 100 --lr-warmup-tokens 100 --mock-data"),
            (
                1,
                f"{MODEL} {RUN} --train-tokens 1e6 --lr-decay-tokens 1e6 --lr-decay-style WSD --mock-data",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-tokens 1e6 --lr-decay-style WarmupLR --mock-data",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-iters 100 --train-data-path corpus",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-iters 100 --valid-data-path corpus --tokenizer-type GPT2BPETokenizer",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-iters 100 --data-path corpus --split none --tokenizer-type GPT2BPETokenizer",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-iters 100 --train-data-path corpus --data-args-path words --tokenizer-type "
                "NullTokenizer",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-iters 100 --data-path a b --blend-weights epochs --tokenizer-type "
                "NullTokenizer",
            ),
            (1, GOOD.replace("--vocab-size 50257", "")),
            (
                1,
                GOOD.replace(
                    "--hidden-size 768",
                    "--config large.yaml --deepspeed_config lr.json",
                ),
            ),
            (
                1,
                GOOD.replace(
                    "--lr 6e-4",
                    "--deepspeed_config lr.json --config large.yaml other.yaml",
                ),
            ),
            (2, f"{SAMPLES} 1000 --global-batch-size 64 --rampup-batch-size 16 9 1000"),
            (2, f"{SAMPLES} 1000 --global-batch-size 64 --rampup-batch-size 16 9"),
            (
                2,
                f"{SAMPLES} 1000 --step-batch-size-schedule 0:8 2K:18 --global-batch-size 4",
            ),
            (
                2,
                f"{SAMPLES} 1000 --step-batch-size-schedule 10K:8 --rampup-batch-size 4 4 40 --train-iters 5",
            ),
            (1, "--fim-data --fim-rate 1.5"),
            (1, "--fim-data --fim-fragment-rate 0.1 --fim-pad-token <pad>"),
            (1, f"{SAMPLES} 100 --fim-data"),
            (1, f"{SAMPLES} 100 --pack-documents --fim-data"),
            (1, f"{SAMPLES} 100 --sft --curriculum-type seqlen_truncate"),
            (
                1,
                f"{MODEL} {RUN} --lr 1 --train-iters 9 --data-path a --vocab-size 9 --tokenizer-type NullTokenizer "
                "--sft --no-pack-documents --no-calculate-per-token-loss",
            ),
            (1, f"{SAMPLES} 100 --fim-spm-rate 0 --fim-fragment-rate 0.1"),
            (
                2,
                f"{SAMPLES} 1000 --global-batch-size 3 --decrease-batch-size-if-needed",
            ),
            (2, f"{SAMPLES} 63 --global-batch-size 64"),
            (
                2,
                f"{MODEL} --lr 1 --mock-data --train-iters 100 --deepspeed_config triad.json",
            ),
            (1, f"{GOOD} --offload-optimizer cpu --offload-param nvme --zero-stage 0"),
            (1, f"{GOOD} --offload-optimizer nvme --zero-stage 2"),
            (
                1,
                f"{GOOD} --offload-optimizer nvme --zero-stage 2 --nvme-path triad.json",
            ),
            (
                1,
                f"{GOOD} --offload-optimizer cpu --offload-optimizer-ratio 1.5 --zero-stage 2",
            ),
            (
                1,
                f"{GOOD} --offload-optimizer-ratio 0.5 --sub-group-size 4096 --nvme-io threads",
            ),
            (4, f"{GOOD} --zero-stage 3 --zero-hpz-partition-size 3"),
            (
                1,
                f"{GOOD} --zero-hpz-partition-size 2 --prescale-gradients --gradient-predivide-factor 4",
            ),
            (1, f"{GOOD} --zero-stage 3 --zero3-pin-stage maybe"),
            (
                4,
                f"{GOOD} --zero-stage 1 --zero-quantized-weights --zero-quantized-gradients --offload-param cpu "
                "--communication-data-type bf16",
            ),
            (
                1,
                f"{MODEL} {RUN} --train-samples 100 --mock-data --deepspeed_config lr.json",
            ),
        )
    ),
    *(
        (ranks, f"{GOOD} {extra}")
        for ranks, extra in (
            (1, "--config experts.yaml"),
            (
                4,
                f"--moe-router-topk 4 --mlp-type residual --moe-aux-loss-coeff 0.01 {EP} 2",
            ),
            (
                1,
                "--moe-grouped-gemm --moe-router-force-load-balancing --moe-layer-recompute --moe-dispatch-fwd-dtype "
                "mxfp8 --num-experts-switch 8",
            ),
            (
                1,
                "--num_moe_experts 8 --num-experts-per-tok 2 --n-shared-experts 1 --moe-router-topK 3 --moe-quux",
            ),
            (1, "--window-size 128"),
            (1, "--window-size -2,0"),
            (
                1,
                "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 0.5",
            ),
            (
                1,
                "--position-embedding-type rope --rotary-seq-len-interpolation-factor 0.5",
            ),
            (
                1,
                "--cpu-offloading --cpu-offloading-weights --hybrid-context-parallel --tiled-mlp 3 --num-experts 4",
            ),
            (4, "--context-parallel-size 4 --cp-comm-type a2a+p2p"),
            (
                12,
                "--context-parallel-size 12 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 3",
            ),
            (2, "--context-parallel-size 2 --cp-comm-type a2a+p2p"),
            (1, "--window-size 128,4"),
            (1, "--window-size -1,0"),
            (1, "--window-size (0,0)"),
            (1, "--window-attn-skip-freq 2 --softmax-type sinks"),
            (1, "--window-size 128,0 --window-attn-skip-freq 1"),
            (1, "--window-size 128,0 --window-attn-skip-freq [1]*11"),
            (1, "--window-size 128,0 --window-attn-skip-freq ([1]*3+[0]"),
            (1, "--num-experts 8 8"),
            (1, "--num-experts 0"),
            (1, "--num-experts 1000000000"),
            (1, "--num-experts 8 65537 --moe-layer-freq [0]*10+[1]*2 --topk 9"),
            (1, "--num-experts 4 8 --expert-interval 13"),
            (1, "--num-experts 4 --expert-interval 13"),
            (1, "--num-experts 4 --moe-layer-freq [0]*12"),
            (1, "--num-experts 4 --moe-layer-freq [0]*4+[1]*9"),
            (1, "--num-experts 4 --moe-layer-freq 0"),
            (1, "--num-experts 4 --moe-layer-freq [1]*99999"),
            (1, "--num-experts 4 --moe-layer-freq 1 --expert-interval 2"),
            (8, f"--num-experts 4 6 --moe-layer-freq [0]*10+[1]*2 {EP} 4"),
            (4, f"--num-experts 8 {EP} 8"),
            (12, f"--num-experts 8 {EP} 8 {TP} 2"),
            (3, f"--num-experts 8 {EP} 3"),
            (6, f"--num-experts 8 {EP} 4"),
            (2, f"--num-experts 8 --expert-tensor-parallel-size 1 {TP} 2"),
            (2, f"--num-experts 8 --expert-tensor-parallel-size 3 {TP} 2"),
            (
                2,
                f"--num-experts 8 --expert-tensor-parallel-size 4 {TP} 2 --sequence-parallel",
            ),
            (
                4,
                "--num-experts 8 --expert-tensor-parallel-size 2 --moe-expert-capacity-factor 1 "
                "--moe-pad-expert-input-to-capacity",
            ),
            (
                4,
                f"--num-experts 8 --expert-tensor-parallel-size 1 {TP} 4 --sequence-parallel {EP} 8",
            ),
            (
                4,
                "--num-experts 8 --expert-tensor-parallel-size 4 --moe-ffn-hidden-size 333",
            ),
            (
                2,
                f"--num-experts 8 --moe-ffn-hidden-size 333 --moe-shared-expert-intermediate-size 5 {TP} 2",
            ),
            (
                4,
                "--hidden-size 766 --kv-channels 64 --ffn-hidden-size 3072 --num-experts 8 "
                f"--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity {TP} 4",
            ),
            (1, "--num-experts 8 --moe-shared-expert-gate"),
            (
                1,
                "--num-experts 8 --mlp-type residual --moe-shared-expert-intermediate-size 64",
            ),
            (1, "--num-experts 2 --topk 3"),
            (1, "--num-experts 8 --topk 1"),
            (1, "--num-experts 8 --moe-input-jitter-eps 0.1 --moe-router-noise gumbel"),
            (1, "--num-experts 8 --moe-router-num-groups 4"),
            (1, "--num-experts 8 --moe-router-group-topk 4"),
            (1, "--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1"),
            (1, "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 5"),
            (
                1,
                "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3",
            ),
            (
                1,
                "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 4",
            ),
            (1, "--num-experts 8 --moe-router-enable-expert-bias"),
            (1, "--num-experts 8 --moe-router-bias-update-rate 0.1"),
            (
                1,
                "--num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
            ),
            (
                1,
                "--num-experts 8 --moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.1",
            ),
            (
                1,
                "--num-experts 8 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            ),
            (
                1,
                "--num-experts 8 --moe-router-load-balancing-type none aux_loss --moe-aux-loss-coeff 0 0.1",
            ),
            (1, "--num-experts 8 --moe-router-load-balancing-type balanced"),
            (
                2,
                "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1 --topk 1 "
                f"--moe-router-num-groups 4 --moe-router-group-topk 1 {TP} 2 --sequence-parallel",
            ),
            (
                1,
                "--num-experts 8 --moe-router-load-balancing-type expert_choice --moe-expert-capacity-factor 1 "
                "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            ),
            (1, "--num-experts 8 --moe-eval-capacity-factor 2"),
            (
                1,
                "--num-experts 8 --moe-min-capacity 4 --moe-token-drop-policy position "
                "--moe-pad-expert-input-to-capacity --moe-capacity-scope micro-batch",
            ),
            (
                1,
                "--num-experts 8 --moe-expert-capacity-factor -1 --moe-router-score-function sqrtsoftplus",
            ),
        )
    ),
]


def message(ranks: int, words: str) -> str:
    try:
        parse(words.split(), ranks, env={})
    except ConfigError as error:
        return str(error)
    return "(accepted)"


# Whose messages are on the page.
SHOWN = (
    "",
    "… --num_lyers 12 --lr fast --bf16 true --seed",
    "… --use-flash-attn --data-impl lazy --exit-signal SIGHUP --num-experts 8 --moe-router-topk 2",
    "… --lr fast --num_lyers 3 --fp16 --bf16 --config synonyms.yaml --deepspeed_config off.json",
    "… --swiglu --squared-relu",
    "… --activation gulu --hidden-dropout 1 --normalization batchnorm",
    "… --tensor-model-parallel-size 3",
    "… --tensor-model-parallel-size 2 --num-query-groups 1 --sequence-parallel --seq-length 1023",
    "… --num-attention-heads 11",
    "… --group-query-attention",
    "… --max-position-embeddings 512",
    "… --train-samples 1000 --lr-warmup-samples 10",
    "… --lr-decay-style WSD",
    "… --lr-wsd-decay-iters 10",
    "… --fp16 --bf16 --loss-scale 1024",
    "… --config gpt.yaml",
    "… --config nowhere.yaml",
    "… --config broken.yaml",
    "… --deepspeed_config ds.json",
    "… --deepspeed_config broken.json",
    "MODEL RUN --train-samples 100 --mock-data --deepspeed_config lr.json",
    "MODEL RUN --mock-data --train-samples 1000 --global-batch-size 64 --rampup-batch-size 16 9 1000",
    "… --window-size -1,0",
    "… --num-experts 8 --expert-model-parallel-size 8",
    "… --num-experts 8 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2",
    "… --num-experts 8 --moe-router-load-balancing-type balanced",
)
NAMED = re.compile(r"""--[\w-]+|[\w.]+\.(?:yaml|json)(?::\d+)?|"[\w.]+"|'[^' ]+'""")


def short(words: str) -> str:
    """A command in which the good flags are an ellipsis."""
    return " ".join(
        words.replace(GOOD, "…").replace(MODEL, "MODEL").replace(RUN, "RUN").split()
    )


def page() -> str:
    """Some cases as a session: `$ ranks: flags`, then the message."""
    blocks = [f"[{name}]\n{text.rstrip()}\n" for name, text in FILES.items()]
    blocks += [
        f"$ {ranks} rank{'s' * (ranks > 1)}: {short(words)}\n{message(ranks, words)}\n"
        for ranks, words in CASES
        if short(words) in SHOWN
    ]
    return "\n".join(blocks).replace(os.getcwd(), "DIRECTORY")


def refusals() -> str:
    """All cases, a line each: the first names in each of their problems."""
    lines = []
    for ranks, words in CASES:
        found = re.split(r"^ +\d+\. ", message(ranks, words), flags=re.MULTILINE)
        problems = found[1:] or found
        named = [" ".join([*dict.fromkeys(NAMED.findall(p))][:2]) for p in problems]
        lines.append(f"{ranks}: {short(words)} → {', '.join(named)}\n")
    return "".join(lines)


GOLDEN_FILES = {"config_messages.txt": page, "config_refusals.txt": refusals}


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_messages_read_as_agreed(files):
    assert {*SHOWN} <= {short(words) for _, words in CASES}
    assert page() == (GOLDEN / "config_messages.txt").read_text(encoding="utf-8")


def test_each_problem_is_refused_for_what_is_wrong(files):
    assert refusals() == (GOLDEN / "config_refusals.txt").read_text(encoding="utf-8")


def test_no_bad_input_is_accepted(files):
    assert [
        words for ranks, words in CASES if message(ranks, words) == "(accepted)"
    ] == []


def test_the_good_flags_are_good():
    assert message(1, GOOD) == "(accepted)"


def _write_golden() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, text in FILES.items():
            Path(name).write_text(text)
        for name, text in GOLDEN_FILES.items():
            (GOLDEN / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    _write_golden()
