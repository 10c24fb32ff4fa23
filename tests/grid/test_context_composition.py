"""Ranks that share sequences, with what the grid of test_context_grid.py does not hold: other schedules and
dtypes, offload, curricula, packed samples, tiles, three ranks, scaled rotary frequencies.

`make test` has each of these once, MEGATRON_DS_TEST_ALL=1 all combinations. What a case has and the grid has
not is observed in the run, or the run without it is shown to train otherwise.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch

from tests.harness.layout_comparison import difference
from tests.harness.layout_runs import GLOBAL_BATCH, JOB_STEPS, Run, reference_of, stray
from tests.harness.tiny_jobs import SEQ_LENGTH, TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

STEPS, LAYERS = 4, 2  # four layers where there are two stages
DISK = "DISK"  # replaced by a folder
OPERATIONS = {
    "p2p": {"send"},
    "all_gather": {"all_gather", "reduce_scatter"},
    "a2a": {"all_to_all"},
    "a2a+p2p": {"send"},
}  # here each rank has the heads of its own tokens
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROWING = "--curriculum-min-length 8 --curriculum-steps 4 --curriculum-length-step 8 --curriculum-type"
SCALED = [
    "--position-embedding-type yarn --original-max-position-embeddings 12",
    "--use-rope-scaling --original-max-position-embeddings 12",
]
# Part of a case's name → what shows in the run that it is in force.
OBSERVED: Mapping[str, Callable[[Run], bool]] = {
    "schedule=gpipe": lambda run: (
        {seen.peak_alive for seen in run.seen} == {GLOBAL_BATCH}
    ),
    "schedule=zb-h2": lambda run: (
        max(seen.peak_alive for seen in run.seen) == 3
    ),  # of 1f1b and zb-h1: 2
    "schedule=zb": lambda run: all(
        seen.weight_halves == STEPS * GLOBAL_BATCH for seen in run.seen
    ),
    "offload=cpu": lambda run: all("cpu" in seen.places for seen in run.seen),
    "offload=nvme": lambda run: all("nvme" in seen.places for seen in run.seen),
    "logits=3": lambda run: run.calls.count("logits in chunks") > 0,
    "tiles=2": lambda run: run.calls.count("tile") > run.calls.count("mlp"),
    # inputs of blocks, besides those of the head: one gather in each recomputation
    "parts=1": lambda run: (
        run.seen[0].traffic.calls["all_gather", "tp", 2] > LAYERS * STEPS * GLOBAL_BATCH
    ),
    "packed": lambda run: run.calls.count("packed") > 0,
}


@dataclass(frozen=True)
class Case:
    """style, dtype, samples: of the job, with more flags; layout: as compare_layouts.py takes it."""

    style: str
    dtype: str
    layout: str
    flags: str = ""
    samples: str = "cut"

    def __str__(self) -> str:
        more = self.flags.replace("--", "").replace(" ", "-")
        return "-".join(
            filter(None, (self.style, self.dtype, self.layout, self.samples, more))
        )

    def job(self) -> list[str]:
        documents = "joined" if self.style == "bert" else "apart"
        layers = LAYERS + 2 * ("pp" in self.layout)
        return [
            *tiny_job(
                self.style,
                self.dtype,
                self.style == "llama",
                0.1,
                layers,
                GLOBAL_BATCH,
                JOB_STEPS,
                documents,
                self.samples,
            ),
            *self.flags.split(),
        ]

    def value(self, key: str, default: str) -> str:
        """The value of a key of the layout."""
        return dict(item.split("=") for item in self.layout.split(",")).get(
            key, default
        )


EACH_ONCE = [
    Case("llama", "fp32", "cp=2,pp=2,schedule=gpipe"),
    Case("gpt2", "fp32", "cp=2,pp=2,schedule=zb-h2,zero=1"),
    Case("gpt2", "fp32", "cp=2,pp=2,schedule=zb-auto"),
    Case("llama", "bf16", "cp=2,tp=2,sp=1,zero=1"),
    Case("llama", "fp16", "cp=2,pp=2"),
    Case(
        "gpt2", "fp32", "cp=2,zero=3,dp=2,offload=cpu,offload_param=cpu,recompute=full"
    ),
    Case("gpt2", "fp32", f"cp=2,zero=1,offload=nvme,nvme={DISK}"),
    Case("gpt2", "fp32", "cp=2", f"{GROWING} seqlen_truncate"),
    Case("llama", "fp32", "cp=2,comm_type=a2a,tp=2,sp=1", f"{GROWING} seqlen_reshape"),
    Case("gpt2", "fp32", "cp=2,comm_type=all_gather", samples="packed"),
    Case("gpt2", "fp32", "cp=2,logits=3,tiles=2,recompute=full,inputs_in_cpu=1"),
    Case("llama", "fp32", "cp=2,tp=2,recompute=full,parts=1,tiles=2"),
    Case("gpt2", "fp32", "cp=3,comm_type=all_gather"),
    Case("llama", "fp32", "cp=2", SCALED[0]),
    Case("llama", "fp32", "cp=2,comm_type=a2a", SCALED[1]),
]
OTHERS = [
    Case("gpt2", "bf16", "cp=4,comm_type=all_gather"),
    Case("gpt2", "bf16", "cp=2,comm_type=a2a,zero=3,dp=2"),
    Case("llama", "fp32", "cp=4", samples="packed"),
    Case("llama", "fp32", "cp=4,comm_type=a2a", samples="packed"),
    Case("bert", "fp32", "cp=2,comm_type=a2a+p2p,hcp=1 2,pp=2"),
    Case("bert", "bf16", "cp=4,zero=2"),
]
CASES = EACH_ONCE + OTHERS * bool(os.environ.get("MEGATRON_DS_TEST_ALL"))


def calls_over(run: Run, axis: str) -> set[str]:
    """Operations between ranks along the axis, and others."""
    return {
        operation
        for seen in run.seen
        for operation, axes, _ in seen.traffic.calls
        if axis in axes.split("-")
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_like_one_process(case, tmp_path):
    apart, run = stray(case.job(), case.layout.replace(DISK, str(tmp_path)), STEPS)
    assert apart.is_within(TOLERANCE[case.dtype]), apart
    # In force: each rank holds its share of the tokens, of all lengths of a curriculum, and attention
    # communicates.
    parts = int(case.value("cp", "1")) * (
        int(case.value("tp", "1")) if "sp=1" in case.layout else 1
    )
    lengths = {8, 16, SEQ_LENGTH} if "curriculum" in case.flags else {SEQ_LENGTH}
    assert {shape[0] for seen in run.seen for shape in seen.block_inputs} == {
        n // parts for n in lengths
    }
    assert OPERATIONS[case.value("comm_type", "p2p")] <= calls_over(run, "cp")
    assert set.union(*(seen.dtypes for seen in run.seen)) == {DTYPES[case.dtype]}
    assert [
        name for name, holds in OBSERVED.items() if name in str(case) and not holds(run)
    ] == []


@pytest.mark.parametrize("flags", SCALED)
def test_without_scaled_frequencies_it_would_train_otherwise(flags):
    job = next(case for case in EACH_ONCE if case.flags == flags).job()
    plain = job[: len(job) - len(flags.split())]
    scaled, others = (reference_of(flags, "", STEPS) for flags in (job, plain))
    apart = difference(scaled.merged, others.merged, scaled.model)
    assert (
        apart.grad_norm > 3 * TOLERANCE["fp32"].grad_norm
        and apart.weights > 3 * TOLERANCE["fp32"].weights
    )


def test_each_observation_is_of_a_case():
    assert [
        name for name in OBSERVED if not any(name in str(case) for case in EACH_ONCE)
    ] == []
