"""A small corpus of real text for benchmarks that train models, the source of Python's standard library
without its tests, and the validation losses of their runs.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
from megatron_ds.training.observe.metrics_file import read_metrics  # noqa: E402


def make_corpus(folder: Path) -> None:
    """Write tokenizer and tokens of the standard library's source files, unless they exist."""
    if (folder / "corpus_text_document.idx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_path("stdlib"))
    corpus = folder / "corpus.jsonl"
    with corpus.open("w") as lines:
        for path in sorted(library.rglob("*.py")):
            text = path.read_text(errors="ignore")
            if len(text) > 200 and not {"site-packages", "test", "tests"} & set(
                path.parts
            ):
                lines.write(json.dumps({"text": text}) + "\n")
    tokenizer = folder / "tokenizer"
    for tool, *flags in (
        (
            "train_tokenizer.py",
            "--input",
            corpus,
            "--vocab-size",
            "2048",
            "--output",
            tokenizer,
        ),
        (
            "preprocess_data.py",
            "--input",
            corpus,
            "--output-prefix",
            folder / "corpus",
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            tokenizer,
            "--append-eod",
            "--workers",
            "1",
        ),
    ):
        subprocess.run(
            [sys.executable, str(HERE / "tools" / tool), *map(str, flags)], check=True
        )


def losses(path: Path) -> list[tuple[int, float]]:
    """[(step, validation loss)] of a run."""
    return [
        (r["step"], r["loss"]) for r in read_metrics(path) if r["kind"] == "validation"
    ]


def is_finished(path: Path, steps: int) -> bool:
    """Whether a run has reached its last step."""
    return path.exists() and any(step == steps for step, _ in losses(path))
