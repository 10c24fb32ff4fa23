"""Whether two checkouts compute the same: losses, gradient norms, weights and plans of the same commands.

    git worktree add ../before main                              # the commit to compare with
    F=benchmarks/same_as_commit.py
    python $F record ../before before.json                       # under five minutes on two cores
    python $F record . after.json                                # --only zero3 bert: some cases
    python $F compare before.json after.json                     # exit code 1 at any difference
    python $F checkpoints ../before .                            # those of one tree resume in the other

`record` runs command lines of a tree on CPUs. It stores every value of metrics.jsonl except times and memory,
a SHA-256 of the final weights and of a corpus, and the text of dry runs. `checkpoints` trains three steps in
the first tree and resumes in both: the next three must be equal at the same layout, and close at another. A
tree may rename its modules. It runs with its own .venv if it has one, and needs its compiled extensions.
Processors round differently: record both trees on one machine.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from safetensors.numpy import load_file

JOB = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --make-vocab-size-divisible-by 8 --micro-batch-size 1 --global-batch-size 8
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1
    --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --eval-iters 1 --eval-interval 3 --save run
    --distributed-timeout-minutes 2 """
MODEL = (
    "--num-layers {} --hidden-size {} --num-attention-heads {} --seq-length {} --micro-batch-size {} "
    "--global-batch-size {}"
)
# Words of the tables below that stand for flags. So do tp2, pp2, zero2, and the names of schedules.
SHORT = {
    line.split()[0]: line.split(None, 1)[1]
    for line in f"""
mock       --mock-data --vocab-size 131
steps      --train-iters 5 --lr-warmup-iters 2
llama      --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
               --num-query-groups 2 --untie-embeddings-and-output-weights
dropout    --hidden-dropout 0.1 --attention-dropout 0.1
sp         --sequence-parallel
fp16       --fp16 --initial-loss-scale 4194304 --loss-scale-window 2 --hysteresis 1
bf16       --bf16
nvme       --offload-optimizer nvme --offload-nvme-path .
recompute  --recompute-granularity
per-token  --calculate-per-token-loss --eod-mask-loss
apart      --reset-position-ids --reset-attention-mask
random-ltd --random-ltd --random-ltd-min-tokens 8 --random-ltd-steps 4 --random-ltd-tokens-per-step 4
lengths    --curriculum-min-length 8 --curriculum-steps 4 --curriculum-length-step 8 --curriculum-type
0/1        --var-freeze-step 2 --var-update-scaler 1 --local-step-scaler 1 --local-step-clipper 2
bigbird    --sparse-attention bigbird --sparse-block 8 --sparse-num-random-blocks 1
ramp       --train-samples 24 --lr-warmup-samples 8 --rampup-batch-size 2 2 16
fim        --fim-data --fim-prefix-token 1 --fim-middle-token 2 --fim-suffix-token 3
corpus     --data-path ../corpus/gpt_text_document --tokenizer-type HuggingFaceTokenizer \
               --tokenizer-model ../corpus/bpe --split 80,15,5
sentences  --data-path ../corpus/bert_text_sentence --tokenizer-type BertWordPieceLowerCase \
               --vocab-file ../corpus/vocab.txt --split 80,15,5
plan       --dry-run --mock-data --vocab-size 50257 --lr 1e-4 --train-iters 5000
plan-cpu   --dry-run cpu --mock-data --vocab-size 500 --lr 1e-4 --train-iters 5000
laptop     {MODEL.format(4, 64, 4, 32, 2, 32)}
125m       {MODEL.format(12, 768, 12, 2048, 4, 256)}
7b         --config TREE/examples/llama_7b.yaml
70b        {MODEL.format(80, 8192, 64, 4096, 1, 1024)}
175b       {MODEL.format(96, 12288, 96, 2048, 1, 1536)}
530b       {MODEL.format(105, 20480, 128, 2048, 1, 1920)}
1t         {MODEL.format(128, 25600, 160, 2048, 1, 3072)}
""".strip().splitlines()
}
PATTERNS = {
    r"^tp(\d+)$": r"--tensor-model-parallel-size \1",
    r"^pp(\d+)$": r"--pipeline-model-parallel-size \1",
    r"^zero(\d)$": r"--zero-stage \1",
    r"^(gpipe|interleaved|zb-\w+)$": r"--pipeline-schedule \1",
}
# Name, ranks, flags. BERT is trained where the name begins with bert; torchrun starts the ranks likewise.
TRAINING = """
alone-dropout-label-smoothing 1 mock steps dropout --label-smoothing 0.1 --clip-grad 0.3
alone-reshaped-lengths-sgd    1 mock steps lengths seqlen_reshape --optimizer sgd
alone-llama-documents         1 corpus steps llama bf16 apart per-token --micro-batch-size 2
tp2-recompute-full            2 mock steps tp2 dropout bf16 recompute full
tp2-sp-recompute-selective    2 corpus steps tp2 sp llama dropout recompute selective --pack-documents
tp2-sp-random-ltd             2 mock steps tp2 sp random-ltd --data-readers first
tp2-sp-pp2-tied-dropout       4 mock steps tp2 sp pp2 dropout
tp2-dp2-zero1-llama           4 mock steps tp2 zero1 llama bf16
pp2-gpipe-llama               2 mock steps pp2 gpipe llama
pp2-interleaved-tied          2 mock steps pp2 interleaved
pp2-zb-v-tied-label-smoothing 2 mock steps pp2 zb-v --label-smoothing 0.1
pp2-zb-auto-per-token         2 corpus steps pp2 zb-auto bf16 per-token
pp4-zb-h2-llama               4 mock steps pp4 zb-h2 llama
pp2-dp2-zb-h1-zero2           4 mock steps pp2 zb-h1 zero2
pp2-dp2-zero3-pinned          4 mock steps pp2 zero3 llama bf16 --zero3-pin-stage
dp2-zero0-fp16                2 mock steps fp16
dp2-zero1-ramp-lengths        2 mock ramp zero1 lengths seqlen_truncate
dp2-zero2-full-offload-cpu    2 mock steps zero2 llama bf16 --zero-accumulate full --offload-optimizer cpu
dp2-zero3-offload-nvme        2 mock steps zero3 nvme --offload-param=nvme --sub-group-size 4096
dp2-zero1-onebit-lamb         2 mock steps zero1 llama bf16 --optimizer onebit_lamb --freeze-step 2
dp2-zero0-zero-one-adam       2 mock steps 0/1 --optimizer zero_one_adam
tp2-sp-sparse-bigbird         2 mock steps tp2 sp bigbird
dp4-zero3-hpz-fp16            4 mock steps zero3 fp16 --zero-hpz-partition-size 2
bert-dropout                  1 sentences steps dropout --micro-batch-size 4
bert-tp2-sp-no-binary-head    2 sentences steps tp2 sp bf16 --no-bert-binary-head
bert-pp2-zb-h1                2 mock steps pp2 zb-h1
torchrun-dp2-zero2-fim        2 corpus steps zero2 fim --offload-optimizer cpu --offload-optimizer-ratio 0.5
"""
PLANS = """
laptop                   1 laptop plan-cpu
laptop-tp2-pp2           4 laptop plan-cpu tp2 pp2 sp --rank 3
laptop-zb-v-pinned       8 laptop plan-cpu pp2 zb-v zero3 --zero3-pin-stage
laptop-zb-auto-fp16      4 laptop plan-cpu pp4 zb-auto fp16 --rank 2
laptop-bert              4 laptop plan-cpu tp2 zero1 --model bert
laptop-random-ltd        2 laptop plan-cpu random-ltd lengths seqlen_truncate
125m                     1 125m plan
125m-zero3               8 125m plan bf16 zero3
125m-zero1-onebit-lamb   8 125m plan bf16 zero1 --optimizer onebit_lamb --freeze-step 1000
125m-zero-one-adam       8 125m plan bf16 0/1 --optimizer zero_one_adam
125m-pp4-gpipe           8 125m plan pp4 gpipe fp16 --rank 7
125m-bert-zero2          8 125m plan bf16 zero2 --model bert
7b-tp4-pp2              64 7b plan tp4 pp2 sp zero1 --rank 63
7b-zero3-hpz            64 7b plan zero3 --zero-hpz-partition-size 8
7b-zero3-offload         8 7b plan zero3 nvme --offload-param cpu
7b-pp8-zb-h1            32 7b plan pp8 zb-h1 --rank 31
70b-tp8-pp8-interleaved 512 70b plan bf16 llama --num-query-groups 8 tp8 pp8 sp interleaved --rank 511
70b-pp8-zb-h2          256 70b plan bf16 llama pp8 zb-h2 zero2 --rank 100
175b-tp8-pp16         1536 175b plan bf16 tp8 pp16 sp recompute full
530b-tp8-pp35         2240 530b plan bf16 tp8 pp35 sp recompute selective zero1
1t-tp8-pp64           3072 1t plan bf16 tp8 pp64 recompute full --rank 3071
1t-interleaved        3072 1t plan bf16 tp8 pp64 sp recompute full interleaved zero1
"""
# Name, ranks, flags; those of the layout that trains and resumes; of another that resumes; its tolerance.
CHECKPOINTS = """
tp2-pp2          4 mock --train-iters 6 dropout    | tp2 pp2 sp zero1       | pp2 zero3       | 1e-5
zero3-llama-bf16 2 mock --train-iters 6 llama bf16 | zero3                  | tp2 sp          | 1e-3
zero2-nvme-fp16  2 mock --train-iters 6 fp16       | zero2 nvme             | pp2             | 1e-3
zb-v-tied        2 mock --train-iters 6            | pp2 zb-v               | zero1           | 1e-5
onebit-lamb      4 mock --train-iters 6 --optimizer onebit_lamb --freeze-step 2 | tp2 zero1 | pp2 | 1e-3
bert-tp2         2 mock --train-iters 6            | tp2                    | pp2 interleaved | 1e-5
"""
CORPUS = """
tools/train_tokenizer.py --input text.jsonl --vocab-size 300 --output bpe
tools/preprocess_data.py --input text.jsonl --output-prefix gpt --append-eod \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model bpe
tools/preprocess_data.py --input text.jsonl --output-prefix bert --split-sentences \
    --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt
"""
WORDS = "the a reader writer reads writes rereads rewrote slowly gladly sentence of and with pages".split()
TIMING = {
    "run",
    "start",
    "time",
    "began",
    "save_seconds",
    "step_seconds",
    "tokens_per_second",
    "tflops_per_rank",
    "mfu",
    "eta_seconds",
    "memory_gib",
    "data_seconds",
    "eval_seconds",
}
ABSENT = "absent"


def rows(table: str) -> dict[str, tuple[int, str]]:
    """Ranks and flags of each name."""
    columns = (line.split(None, 2) for line in table.strip().splitlines())
    return {name: (int(ranks), flags) for name, ranks, flags in columns}


def chosen_of(cases: dict, only: list[str]) -> dict:
    return {
        name: case for name, case in cases.items() if any(part in name for part in only)
    }


def flags_of(words: str) -> str:
    flags = [SHORT.get(word, word) for word in words.split()]
    for pattern, flag in PATTERNS.items():
        flags = [re.sub(pattern, flag, word) for word in flags]
    return " ".join(flags)


def _results(file: Path) -> list[dict]:
    """The records of a run without times, the version of the package, and what describes the run."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    for record in found:
        record.get("environment", {}).pop("megatron_ds", None)
    return [
        {key: value for key, value in record.items() if key not in TIMING}
        for record in found
        if record["kind"] != "about"
    ]


class Tree:
    """A checkout, whose commands run in folders below `work`."""

    def __init__(self, root: str, work: Path):
        self.root = Path(root).resolve()
        self.work = work
        self.made = {}
        python = self.root / ".venv/bin/python"
        self.python = str(python) if python.exists() else sys.executable
        foreign = ("SLURM_", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(foreign)
        } | {
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "100",
        }
        run = partial(subprocess.run, cwd=self.root, capture_output=True, text=True)
        git = lambda *words: run(["git", *words]).stdout.strip()
        self.commit = git("rev-parse", "HEAD") + (
            " with changes" if git("diff", "HEAD") else ""
        )

    def run(
        self, folder: Path, command: str, ranks: int = 1, torchrun: bool = False
    ) -> str:
        """What rank 0 prints. Raises RuntimeError with the end of the output if a rank fails."""
        script, *flags = command.replace("TREE", str(self.root)).split()
        launcher = (
            f"-m torch.distributed.run --standalone --nproc-per-node {ranks}"
            if torchrun
            else ""
        )
        command_line = [self.python, *launcher.split(), str(self.root / script), *flags]
        # A port of this machine, for the ranks to meet.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            world = {
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": probe.getsockname()[1],
            }
        folder.mkdir(parents=True, exist_ok=True)
        logs = [folder / f"log.{rank}" for rank in range(1 if torchrun else ranks)]
        # All ranks, each with a log file.
        processes = []
        try:
            for rank, path in enumerate(logs):
                launch = (
                    world | {"RANK": rank, "LOCAL_RANK": rank} if len(logs) > 1 else {}
                )
                env = self.env | {name: str(value) for name, value in launch.items()}
                processes.append(
                    subprocess.Popen(
                        command_line,
                        cwd=folder,
                        env=env,
                        stdout=path.open("w"),
                        stderr=subprocess.STDOUT,
                    )
                )
            codes = [process.wait(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            ends = "\n".join(log.read_text()[-1500:] for log in logs)
            raise RuntimeError(f"{command}\nexit codes {codes}\n{ends}")
        return logs[0].read_text()

    def corpus(self) -> dict:
        """Make the tokenizers and corpora, at the first call; the SHA-256 of each file."""
        if not self.made:
            folder = self.work / "corpus"
            draw = random.Random(0)
            folder.mkdir(parents=True)
            sentence = lambda: (
                " ".join(draw.choices(WORDS, k=draw.randint(3, 12))).capitalize() + "."
            )
            texts = [
                " ".join(sentence() for _ in range(draw.randint(1, 8)))
                for _ in range(120)
            ]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / "text.jsonl").write_text(lines)
            # Not trained: the training of word pieces breaks ties in another order each time.
            special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
            pieces = [*special, ".", "##s", "##rs", "read", "writ", *WORDS]
            (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
            for command in CORPUS.strip().splitlines():
                self.run(folder, command)
            # Not the .json beside a corpus: it holds the path of its tokenizer.
            files = sorted(
                [*folder.glob("*.bin"), *folder.glob("*.idx"), *folder.glob("bpe/*")]
            )
            digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
            self.made = {
                str(file.relative_to(folder)): digest
                for file, digest in zip(files, digests)
            }
        return self.made

    def train(self, name: str, ranks: int, words: str) -> dict:
        """The records of a run without times, and the SHA-256 of its last weights with names and types."""
        if {"corpus", "sentences"} & set(words.split()):
            self.corpus()
        folder = self.work / name
        kind = "bert" if name.startswith("bert") else "gpt"
        self.run(
            folder,
            f"pretrain_{kind}.py {JOB} {flags_of(words)}",
            ranks,
            name.startswith("torchrun"),
        )
        records = _results(folder / "run/metrics.jsonl")
        self.run(
            folder, "tools/checkpoint_to_safetensors.py --load run --output weights"
        )
        weights = {}
        digest = hashlib.sha256()
        for file in (folder / "weights").glob("*.safetensors"):
            weights |= load_file(file)
        for key, value in sorted(weights.items()):
            digest.update(
                f"{key} {value.shape} {value.dtype} ".encode() + value.tobytes()
            )
        return {
            "records": records,
            "tensors": len(weights),
            "weights": digest.hexdigest(),
        }

    def plan(self, name: str, ranks: int, words: str) -> list[str]:
        command = f"pretrain_gpt.py {flags_of(words)} --world-size {ranks}"
        return (
            self.run(self.work / f"plan-{name}", command)
            .replace(str(self.root), "TREE")
            .splitlines()
        )


def first_difference(a, b, place: str = "") -> str | None:
    """The first place where two values differ, and both of them there."""
    if type(a) is type(b) and isinstance(a, dict | list):
        a, b = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (a, b))
        found = (
            first_difference(a.get(key, ABSENT), b.get(key, ABSENT), f"{place}[{key}]")
            for key in {**a, **b}
        )
        return next((difference for difference in found if difference), None)
    return (
        None if repr(a) == repr(b) else f"{place}: {repr(a)[:300]} and {repr(b)[:300]}"
    )


def attempt(name: str, make) -> object:
    """The result of `make`, or None if it fails. Prints a line."""
    start = time.monotonic()
    made = None
    try:
        made = make()
        outcome = made if isinstance(made, str) else "recorded"
    except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        outcome = f"FAILED: {error}"
    print(f"{time.monotonic() - start:6.1f} s  {name}: {outcome}", flush=True)
    return made


def record(args, work: Path) -> bool:
    tree = Tree(args.first, work)
    start = time.monotonic()
    made = {}
    # The cases.
    runs = {
        name: partial(tree.train, name, *row) for name, row in rows(TRAINING).items()
    }
    plans = {
        f"plan-{name}": partial(tree.plan, name, *row)
        for name, row in rows(PLANS).items()
    }
    # The processor, which decides about bits.
    described = (
        Path("/proc/cpuinfo").read_text()
        if Path("/proc/cpuinfo").exists()
        else platform.processor()
    )
    processor = (
        re.findall(r"^(?:model name|flags).*", described, re.MULTILINE)[:2] or described
    )
    recording = {"commit": tree.commit, "processor": processor, "cases": {}}
    # The file is written after each case, so that a recording that is stopped keeps what it has.
    for threads, cases in (
        (1, {"corpus": tree.corpus} | runs),
        (2, plans),
    ):  # a plan is one process
        chosen = chosen_of(cases, args.only)
        with ThreadPoolExecutor(threads) as pool:
            for name, value in zip(chosen, pool.map(attempt, chosen, chosen.values())):
                made[name] = value
                recording["cases"] = {
                    key: x for key, x in made.items() if x is not None
                }
                Path(args.second).write_text(json.dumps(recording, indent=1))
    good = recording["cases"]
    print(
        f"{len(good)} of {len(made)} cases of {tree.commit} in {time.monotonic() - start:.0f} s"
    )
    return 0 < len(good) == len(made)


def compare(args, _: Path) -> bool:
    a, b = (json.loads(Path(file).read_text()) for file in (args.first, args.second))
    if a["processor"] != b["processor"]:
        print("The processors of the two recordings differ, and may round differently.")
    names = chosen_of({**a["cases"], **b["cases"]}, args.only)
    pairs = {
        name: (a["cases"].get(name, ABSENT), b["cases"].get(name, ABSENT))
        for name in names
    }
    found = {name: first_difference(*pair) for name, pair in pairs.items()}
    print("\n".join(f"{name}: {found[name] or 'equal'}" for name in names))
    equal = list(found.values()).count(None)
    print(f"{equal} of {len(names)} cases are equal: {a['commit']} and {b['commit']}")
    return 0 < equal == len(names)


def checkpoints(args, work: Path) -> bool:
    old = Tree(args.first, work / "old")
    new = Tree(args.second, work / "new")

    def check(name: str, ranks: int, text: str) -> str:
        job, layout, other, tolerance = text.split("|")
        old.train(f"{name}/saved", ranks, f"{job} {layout} --exit-interval 3")
        results = []
        for tree, place, flags in (
            (old, "same", layout),
            (new, "same", layout),
            (new, "other", other),
        ):
            shutil.copytree(
                old.work / name / "saved/run", tree.work / name / place / "run"
            )
            results.append(
                tree.train(f"{name}/{place}", ranks, f"{job} {flags} --load run")
            )
        if difference := first_difference(*results[:2]):
            raise ValueError(f"same layout: {difference}")
        for a, b in zip(results[0]["records"], results[2]["records"], strict=True):
            # Records of saves and of processes have none.
            if "loss" not in a:
                continue
            if not math.isclose(a["loss"], b["loss"], rel_tol=float(tolerance)):
                raise ValueError(
                    f"another layout, step {a['step']}: losses {a['loss']} and {b['loss']}"
                )
        return f"equal; losses of another layout within {tolerance.strip()}"

    cases = chosen_of(rows(CHECKPOINTS), args.only)
    return all(
        [attempt(name, partial(check, name, *row)) for name, row in cases.items()]
    )


def main() -> int:
    modes = {"record": record, "compare": compare, "checkpoints": checkpoints}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mode", choices=modes)
    parser.add_argument(
        "first", help="record and checkpoints: a tree. compare: a recording"
    )
    parser.add_argument(
        "second", help="checkpoints: another tree. record and compare: a recording"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="NAME",
        help="only cases whose names contain one of these",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        return 0 if modes[args.mode](args, Path(work)) else 1


if __name__ == "__main__":
    sys.exit(main())
