"""`megatron-ds evaluate`: the zero-shot tasks of a trained checkpoint, at several layouts."""

import json

import pytest

from tests.harness.pretraining import MOCK, VOCAB, run_pretrain, train

pytestmark = pytest.mark.processes

LAYOUTS = {
    "alone": (1, ()),
    "pipeline": (2, ("--pipeline-model-parallel-size", 2)),
    "sharded": (2, ("--tensor-model-parallel-size", 2, "--zero-stage", 3)),
}
TEXT = [str(i * i % VOCAB) for i in range(75)]
TASKS = {
    "WIKITEXT103": ["--detokenizer", "none", "--overlapping-eval", 5],
    "LAMBADA": ["--strict-lambada"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(2, [*MOCK, "--save", folder])
    (folder / "WIKITEXT103").write_text(" ".join(TEXT))
    lines = [json.dumps({"text": " ".join(TEXT[i : i + 9])}) for i in range(40)]
    (folder / "LAMBADA").write_text("\n".join(lines))
    return folder


def evaluated(checkpoint, task, ranks, *flags):
    output = checkpoint / f"{task}.json"
    data = ["--task", task, "--valid-data", checkpoint / task, *TASKS[task]]
    words = ["--load", checkpoint, *data, "--output", output, *flags]
    ended = run_pretrain(ranks, words, command="evaluate")
    assert [rank.code for rank in ended] == [0] * ranks, ended[0].err
    assert task in ended[0].out and not "".join(rank.out for rank in ended[1:])
    return json.loads(output.read_text())[task]


def test_a_task_has_the_same_result_at_every_layout(checkpoint):
    for task in TASKS:
        found = [
            evaluated(checkpoint, task, ranks, *flags)
            for ranks, flags in LAYOUTS.values()
        ]
        assert found[1] == pytest.approx(found[0], rel=1e-5)
        assert found[2] == pytest.approx(found[0], rel=1e-5)
    assert found[0]["passages"] == 40 and found[0]["shortened"] == 0
    text = evaluated(checkpoint, "WIKITEXT103", 1)
    assert (text["tokens"], text["words"]) == (75, 75)
    assert text["adjusted_perplexity"] == pytest.approx(text["perplexity"])


def test_an_earlier_checkpoint_is_evaluated(checkpoint):
    earlier = checkpoint / "earlier"
    train(1, [*MOCK, "--save", earlier, "--save-interval", 3])
    found = {}
    for step in (3, 6):
        flags = ["--iteration", step, "--load", earlier]
        found[step] = evaluated(checkpoint, "WIKITEXT103", 1, *flags)["loss"]
    assert found[3] != found[6]
    words = ["--load", earlier, "--iteration", 4, "--task", "LAMBADA"]
    words += ["--valid-data", checkpoint / "LAMBADA"]
    (ended,) = run_pretrain(1, words, command="evaluate")
    assert ended.code == 2 and "4" in ended.err


@pytest.mark.parametrize(
    "flags, error",
    [
        ([], "neither of --task and --tasks is given"),
        (["--task", "LAMBADA"], "needs --valid-data FILE"),
        (["--task", "LAMBADA", "--tasks", "a"], "both of --task and --tasks"),
        (["--task", "LAMBADA", "--valid-data", "x"], "with --load"),
        (
            ["--task", "LAMBADA", "--valid-data", "x", "--load", "absent"],
            "--load absent holds no checkpoint",
        ),
        (["--task", "WINOGRANDE"], "invalid choice"),
        (
            ["--task", "LAMBADA", "--valid-data", "x", "--limit", 2],
            "--limit has no effect with --task",
        ),
    ],
)
def test_what_is_missing_is_named(flags, error):
    (ended,) = run_pretrain(1, flags, command="evaluate")
    assert ended.code in (1, 2) and error in ended.err
