"""Run DeepSpeed's own unit tests against this package, and against DeepSpeed, and compare the outcomes.

    python tools/run_deepspeed_tests.py TESTS --out here.tsv                          this package
    python tools/run_deepspeed_tests.py TESTS --out deepspeed.tsv --deepspeed SITE    DeepSpeed, in folder SITE
    python tools/run_deepspeed_tests.py --compare deepspeed.tsv here.tsv              the table of both

TESTS is the folder `tests` of DeepSpeed's repository, which this package does not contain. Its tests import
`deepspeed`: in the first form a module of that name is made in a temporary folder, by
`install_as_deepspeed()`. Names that this package lacks are classes there whose use raises an error, so that a
file is collected all the same.

A test that hangs ends pytest; the tests after it follow in another process. Needs pytest, pytest-timeout and
what DeepSpeed's tests import (hjson, pydantic, einops, transformers); SITE holds DeepSpeed and may hold them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# Files and folders of tests of public API, below tests/.
PUBLIC = (
    "unit/runtime/test_lr_schedulers.py",
    "unit/runtime/test_ds_initialize.py",
    "unit/runtime/test_ds_config_dict.py",
    "unit/runtime/test_ds_config_model.py",
    "unit/runtime/test_no_sync_ctxt.py",
    "unit/runtime/test_multi_output_model.py",
    "unit/runtime/test_multiple_models.py",
    "unit/runtime/test_autocast.py",
    "unit/runtime/test_data.py",
    "unit/runtime/test_runtime_utils.py",
    "unit/runtime/test_precision_config_dynamic_scale.py",
    "unit/runtime/test_precision_config_loss_scale.py",
    "unit/runtime/half_precision",
    "unit/v1/half_precision",
    "unit/runtime/zero",
    "unit/v1/zero",
    "unit/v1/moe/test_moe.py",
    "unit/v1/test_engine_log_level.py",
    "unit/checkpoint",
    "unit/runtime/activation_checkpointing",
    "unit/runtime/comm",
    "unit/runtime/pipe",
    "unit/runtime/sparse_tensor",
    "unit/runtime/utils",
    "unit/comm",
    "unit/launcher",
    "unit/pipe",
    "unit/utils",
    "unit/monitor",
    "unit/elasticity",
    "unit/profiling",
    "unit/sequence_parallelism",
    "unit/ops/adam",
)
HUNG = "hung"
REASONS = ROOT / "tools" / "deepspeed_test_reasons.tsv"

PLUGIN = "deepspeed_tests_plugin"
ALIAS = f"""
import sys
sys.modules.pop(__name__)
from {PLUGIN} import make_alias
make_alias()
"""
# Imported once by the process of which those of the tests are copies.
PRELOAD = "torch deepspeed transformers"


class Run(NamedTuple):
    """A run of files of tests. site: the folder of DeepSpeed; None: this package is tested."""

    tests: Path
    out: Path
    site: Path | None
    sample: int
    limit: int
    size: int
    only: Path | None

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables of a pytest process. folder: where the alias and the plugin are."""
        package = ROOT if self.site is None else self.site
        given = os.environ.get("PYTHONPATH", "")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(folder), str(package), given])
            ),
            "DEEPSPEED_TESTS_OUT": str(self.out),
            "DEEPSPEED_TESTS_PRELOAD": PRELOAD,
            "DEEPSPEED_TESTS_SAMPLE": str(self.sample),
            "DEEPSPEED_TESTS_ONLY": str(self.only or ""),
            "DS_UNITTEST_TIMEOUT": str(self.limit),
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": str(self.size),
            "OMP_NUM_THREADS": "1",
        }


def files_of(tests: Path, chosen: Sequence[str]) -> Iterator[str]:
    """The files of tests among files and folders, as paths below `tests`."""
    for name in chosen:
        place = tests / name
        found = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
        yield from (str(path.relative_to(tests)) for path in found)


def run_files(run: Run, files: Sequence[str], folder: Path) -> None:
    """Run the tests of the files in one process, and after one that hangs the others in another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += [f"--timeout={run.limit + 10}", *files]
    now = Path(f"{run.out}.now")
    hangs = True
    while hangs:
        now.unlink(missing_ok=True)
        with Path(f"{run.out}.err").open("a") as err:
            subprocess.run(
                command,
                cwd=run.tests,
                env=run.environment(folder),
                stdout=err,
                stderr=err,
            )
        hangs = _is_unfinished(run.out, now)
        if hangs:
            with run.out.open("a") as out:
                out.write(
                    f"{HUNG}\t{run.limit}\t{now.read_text()}\tno end after {run.limit} s\n"
                )


def _is_unfinished(out: Path, now: Path) -> bool:
    """Whether the test that began last has no outcome."""
    if not now.exists():
        return False
    lines = out.read_text().splitlines() if out.exists() else []
    return now.read_text() not in {line.split("\t")[2] for line in lines}


def run_all(run: Run, chosen: Sequence[str]) -> None:
    """Run the files and folders of tests, and add their outcomes to the file `run.out`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "tools" / f"{PLUGIN}.py", folder)
        if run.site is None:
            (folder / "deepspeed").mkdir()
            (folder / "deepspeed" / "__init__.py").write_text(ALIAS)
        run_files(run, list(files_of(run.tests, chosen)), folder)


def outcomes(path: Path) -> dict[str, str]:
    """test → outcome, of a file that `run_all` wrote."""
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return {row[2]: row[0] for row in rows}


class Reason(NamedTuple):
    """Why tests whose name begins with `start` fail here.

    kind  internal: they check DeepSpeed's implementation; text: the text of a message; public: public API
    """

    start: str
    kind: str
    text: str


def reasons() -> list[Reason]:
    """The reasons that are known, the longest name first."""
    lines = REASONS.read_text(encoding="utf-8").splitlines()
    found = [Reason(*line.split("\t")) for line in lines if not line.startswith("#")]
    return sorted(found, key=lambda reason: -len(reason.start))


class Row(NamedTuple):
    """The cases of one test that DeepSpeed passes. reason: None where all pass here."""

    test: str
    cases: int
    passed: int
    reason: Reason | None


def rows_of(theirs: Path, ours: Path) -> list[Row]:
    """A row for each test of which DeepSpeed passes a case."""
    here = outcomes(ours)
    tests: dict[str, list[bool]] = {}
    for case, outcome in outcomes(theirs).items():
        if outcome == "passed":
            tests.setdefault(case.split("[")[0], []).append(here.get(case) == "passed")
    known = reasons()
    rows = []
    for test, passes in sorted(tests.items()):
        reason = None
        if not all(passes):
            without = Reason(test, "public", "not looked into")
            found = (reason for reason in known if test.startswith(reason.start))
            reason = next(found, without)
        rows.append(Row(test, len(passes), sum(passes), reason))
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The shares of the cases that pass: of public API, and of all."""
    public = [row for row in rows if row.reason is None or row.reason.kind == "public"]
    return f"{_share(public)} of public API pass; with those of the implementation {_share(rows)}"


def _share(rows: Sequence[Row]) -> str:
    cases = sum(row.cases for row in rows)
    passed = sum(row.passed for row in rows)
    return f"{passed} of {cases} cases ({passed / max(1, cases):.1%})"


def table(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| test | DeepSpeed passes | passes here | why not |", "|---|---|---|---|"]
    for row in rows:
        why = "" if row.reason is None else f"{row.reason.kind}: {row.reason.text}"
        lines.append(f"| `{row.test}` | {row.cases} | {row.passed} | {why} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The flags of the tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    # Which tests, and whose package.
    parser.add_argument(
        "tests",
        nargs="?",
        type=Path,
        help="the folder `tests` of DeepSpeed's repository",
    )
    parser.add_argument(
        "--deepspeed",
        type=Path,
        metavar="SITE",
        help="test DeepSpeed, which is in this folder",
    )
    parser.add_argument(
        "--files", nargs="+", default=PUBLIC, help="files and folders below TESTS"
    )
    _add_choices(parser)
    # The outcomes.
    parser.add_argument(
        "--out",
        type=Path,
        help="a file for the outcomes, to which those of tests not in it are added",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("DEEPSPEED", "HERE"),
        help="two outcome files",
    )
    return parser


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """The flags that choose tests of the files, and limit each."""
    parser.add_argument(
        "--sample",
        type=int,
        default=0,
        help="most tests of each file, drawn at random; 0: all",
    )
    parser.add_argument(
        "--only", type=Path, help="run the tests that pass in this outcome file"
    )
    parser.add_argument("--limit", type=int, default=100, help="seconds for a test")
    parser.add_argument(
        "--size",
        type=int,
        default=2,
        help="most processes of a test; others are skipped",
    )


def main() -> None:
    """Run the tests, or compare two outcome files."""
    parser = make_parser()
    args = parser.parse_args()
    if args.compare:
        rows = rows_of(*args.compare)
        print(table(rows), summary(rows), sep="\n\n")
        return
    if args.tests is None or args.out is None:
        parser.error("give the folder TESTS and --out, or --compare")
    run = Run(
        args.tests.resolve(),
        args.out.resolve(),
        args.deepspeed,
        args.sample,
        args.limit,
        args.size,
        args.only,
    )
    run_all(run, args.files)


if __name__ == "__main__":
    main()
