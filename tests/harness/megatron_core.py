"""megatron-core as a server of the tests (`megatron_core_program.py`), and the tiny models that it trains."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from megatron_ds.extensions.bert.data import BertOptions, MockBertDataset
from megatron_ds.extensions.bert.masking import Masking
from tests.harness.limits import HUNG

SEQUENCE, ROWS = 16, 128
LLAMA = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    position_embedding_type="rope",
    share_embeddings_and_output_weights=False,
    vocab_size=ROWS,
    max_sequence_length=SEQUENCE,
)
GPT2 = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=64,
    position_embedding_type="learned_absolute",
    share_embeddings_and_output_weights=True,
    vocab_size=ROWS,
    max_sequence_length=SEQUENCE,
)
MOE = {
    **LLAMA,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1],
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}
BERT = {**GPT2, "bert": True}
LATENT = {
    **{name: value for name, value in LLAMA.items() if name != "num_query_groups"},
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "rope_type": "yarn",
    "rotary_scaling_factor": 2.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
DEPTHS = {**LLAMA, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.4}
# Latents, experts behind a dense layer, and a further depth.
DEEPSEEK = {
    **MOE,
    **LATENT,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.4,
}
DEEPSEEK.pop("num_query_groups")
LR, STEPS = 1e-2, 2
# without rotary embedding the bias of keys has no gradient but rounding, of which a smaller eps makes steps
EPS = 1e-7


def skip_reason() -> str:
    """Why there is no megatron-core; empty where there is."""
    if (
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None
    ):
        return "megatron-core is not installed"
    return ""


def make_batches(path: Path) -> torch.Tensor:
    """int64 [4, 4, SEQUENCE + 1] of ids that the mock data of layout runs leave as they are."""
    tokens = torch.randint(
        ROWS - 2, (4, 4, SEQUENCE + 1), generator=torch.Generator().manual_seed(3)
    )
    tokens += (tokens % 11 == 0).long()
    torch.save(
        [{"tokens": batch[:, :-1], "labels": batch[:, 1:]} for batch in tokens], path
    )
    return tokens


def make_sentences(path: Path) -> list[list[dict]]:
    """4 batches of 4 samples for BERT as our datasets have them. The file has them as megatron-core does."""
    options = BertOptions(
        SEQUENCE, 3, Masking(0.3, 2, False), pairs=True, short_seq_prob=0.1
    )
    made = MockBertDataset(16, ROWS, options)
    batches = [[made[4 * step + i] for i in range(4)] for step in range(4)]
    names = {
        "tokens": "text",
        "labels": "labels",
        "mask": "loss_mask",
        "types": "types",
        "padding": "padding_mask",
        "order": "is_random",
    }
    torch.save(
        [
            {
                theirs: torch.from_numpy(np.stack([sample[ours] for sample in batch]))
                for theirs, ours in names.items()
            }
            for batch in batches
        ],
        path,
    )
    return batches


class MegatronCore:
    """Runs jobs one after the other. folder: of all files of the jobs."""

    def __init__(self, folder: Path):
        self.folder, self._count = folder, 0
        self.batches = make_batches(folder / "batches.pt")
        self.sentences = make_sentences(folder / "sentences.pt")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._errors = open(folder / "errors.txt", "w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.megatron_core_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )

    def run(
        self,
        name: str,
        model: dict,
        *,
        ranks: int = 2,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        vp: int = 1,
        **job,
    ) -> list[dict]:
        """What each rank has after one more step than was saved. Raises AssertionError with its errors."""
        self._count += 1
        after = self.folder / name / "after"
        batches = "sentences.pt" if model.get("bert") else "batches.pt"
        defaults = dict(
            dtype="float32", distributed=False, load=None, steps=STEPS, saves=[]
        )
        job = {
            **defaults,
            **job,
            "model": model,
            "ranks": ranks,
            "tp": tp,
            "pp": pp,
            "ep": ep,
            "vp": vp,
            "lr": LR,
            "eps": EPS,
            "batches": str(self.folder / batches),
            "after": str(after),
            "timeout": HUNG,
            "store": str(self.folder / f"store{self._count}"),
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        self._errors.seek(0)
        assert answer == "done", f"{name}: {answer!r}\n{self._errors.read()[-5000:]}"
        return [torch.load(after / f"rank{rank}.pt") for rank in range(ranks)]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def logical_weights(ranks: list[dict], model: dict) -> dict[str, torch.Tensor]:
    """Weights of tensor-parallel ranks as one process would hold them, by megatron-core's rules."""
    found = {}
    for name in ranks[0]["weights"]:
        parts = [rank["weights"][name] for rank in ranks]
        if "linear_fc1" in name and model.get("swiglu"):
            halves = [part.chunk(2) for part in parts]
            parts = [half[i] for i in range(2) for half in halves]
            found[name] = torch.cat(parts)
        elif "linear_proj.weight" in name or "linear_fc2.weight" in name:
            found[name] = torch.cat(parts, 1)
        elif any(
            leaf in name
            for leaf in (
                *("linear_qkv", "linear_fc1", "word_embeddings", "output_layer"),
                *("linear_q_", "linear_kv_", "eh_proj"),
            )
        ):
            found[name] = torch.cat(parts)
        else:
            found[name] = parts[0]
    return found


def pipeline_weights(
    ranks: list[dict], when: str = "weights"
) -> dict[str, torch.Tensor]:
    """Weights of pipeline stages under the names of one process, where each chunk has one layer."""
    found = {}
    for stage, rank in enumerate(ranks):
        for name, weight in rank[when].items():
            number, is_later, rest = name.partition(".")
            chunk, name = (
                (int(number), rest) if is_later and number.isdecimal() else (0, name)
            )
            layer = f"layers.{chunk * len(ranks) + stage}."
            if not name.startswith("mtp."):
                name = name.replace("layers.0.", layer)
            found.setdefault(name, weight)
    return found


def mean_loss(ranks: list[dict], term: str = "loss") -> float:
    """A term of the loss, of all micro-batches of all ranks."""
    values = [terms[term] for rank in ranks for terms in rank["terms"]]
    return sum(values) / len(values)
