"""The methods of an observer are called at every moment of a run, in order and with the declared types, and what they
return is done."""

import ast
import contextlib
import inspect
import re
from functools import partial
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron_ds import features
from megatron_ds.errors import DataError
from megatron_ds.features import Feature
from megatron_ds.training import observers, trainer
from megatron_ds.training.moments import Again, Drop, Numbers, Stop
from megatron_ds.training.observer import FIRST, Observer
from megatron_ds.training.observer import LAST as INNERMOST
from tests.harness.pretraining import (
    MOCK,
    losses,
    records,
    run_file,
    run_pretrain,
    same_bits,
    saved_state,
    train,
)

pytestmark = pytest.mark.processes

MOMENTS = [
    name
    for name, value in vars(Observer).items()
    if callable(value) and not name.startswith("_")
]
# Steps of the run of `witnessed`.
AGAIN, DROPPED, LAST = 2, 3, 4
EVERY_STEP = ["step_began", "batch_read", "around"]
ONE_RUN = ["phase forward-backward", "update_checked", "computed"]
UPDATE = ["phase optimizer", "update_checked", "step_ended"]
LINE = ["numbers", "step_logged"]
# What each step has besides: a line every second step, after which the run is evaluated.
STEPS = {
    1: [*EVERY_STEP, *ONE_RUN, *UPDATE, "step_logged", "between_steps"],
    AGAIN: [
        *EVERY_STEP,
        *ONE_RUN,
        *ONE_RUN,
        *UPDATE,
        *LINE,
        "evaluated",
        "between_steps",
        "saved",
        "waited_for_save",
    ],
    DROPPED: [*EVERY_STEP, *ONE_RUN, *UPDATE, "step_logged", "between_steps"],
    LAST: [*EVERY_STEP, *ONE_RUN, *UPDATE, *LINE],
}
RUN = [
    *MOCK,
    *"--train-iters 9 --log-interval 2 --eval-interval 2 --eval-iters 1".split(),
    *"--save-interval 2".split(),
]


def fits(value, kind):
    """Whether the value has the declared type; of a protocol, its members."""
    if not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    members = [name for name in vars(kind) if not name.startswith("_")]
    return len(members) > 0 and all(hasattr(value, name) for name in members)


class Witness(Observer):
    """Writes down its moments, and answers in some steps."""

    def __init__(self, told, fails_in=None):
        self.told = told
        self.fails_in = fails_in
        self.step = 0
        self.runs = 0

    def told_of(self, moment, values):
        line = moment if moment != "phase" else f"phase {values['name']}"
        with self.told.open("a") as file:
            file.write(f"{line}\n")
        hints = get_type_hints(getattr(Observer, moment))
        for name, value in values.items():
            assert fits(value, hints[name]), (moment, name, value)
        return getattr(self, f"when_{moment}", lambda *_: None)(*values.values())

    def when_built(self, replica):
        replica.states["witness"] = self

    def state(self):
        return {"step": self.step}

    def load_state(self, state):
        self.step = state.get("step", 0)

    def when_step_began(self, step):
        self.step = step
        self.runs = 0
        if step == self.fails_in:
            raise DataError("the witness has seen too much")

    def when_computed(self, computed):
        assert computed.progress.step + 1 == self.step
        assert (computed.drop is not None) == (self.step == DROPPED)
        self.runs += 1
        return Again("a witness") if (self.step, self.runs) == (AGAIN, 1) else None

    def when_update_checked(self, norm):
        return Drop("a witness") if self.step == DROPPED else None

    def when_step_ended(self, end):
        assert end.step == self.step
        assert end.skipped == (end.dropped is not None) == (end.step == DROPPED)
        return Stop("the witness has seen enough") if end.step == LAST else None

    def when_numbers(self):
        return Numbers({"params_norm": 7.0})


def moment(name):
    own = getattr(Observer, name)

    def told(self, *args):
        values = inspect.signature(own).bind(self, *args).arguments
        answer = self.told_of(name, dict(list(values.items())[1:]))
        return own(self, *args) if answer is None else answer

    return told


for name in MOMENTS:
    setattr(Witness, name, moment(name))


@contextlib.contextmanager
def witnessed(rank, *, told, fails_in=None):
    """The run has a feature with the observer, as if its module were imported."""
    feature = Feature("witness", observers=[lambda config: Witness(told, fails_in)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observers, "features", lambda: (*features.features(), feature))
        yield


def moments_in(told):
    return told.read_text().splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the moments, the last lines of the log, the folder)"""
    folder = tmp_path_factory.mktemp("run")
    told = folder / "told"
    words = [*RUN, "--save", folder / "saved"]
    (ended,) = train(1, words, spoil=partial(witnessed, told=told))
    return moments_in(told), ended.out, folder / "saved"


def test_moments_come_in_order(run):
    told, _, _ = run
    start = ["built", "loaded", "run_started"]
    steps = [moment for moments in STEPS.values() for moment in moments]
    # The run was stopped, so that it is saved and neither evaluated nor "trained".
    assert told == [*start, *steps, "saved", "waited_for_save", "run_ended", "closed"]


def test_a_complete_run_is_told_the_rest(tmp_path):
    told = tmp_path / "told"
    length = ["--train-iters", "3", "--eval-iters", "1", "--save", tmp_path / "saved"]
    train(1, [*MOCK, *length], spoil=partial(witnessed, told=told))
    end = [
        "saved",
        "waited_for_save",
        "trained",
        "evaluated",
        "evaluated",
        "run_ended",
        "closed",
    ]
    moments = moments_in(told)
    assert moments[-len(end) :] == end
    assert set(MOMENTS) == {moment.split()[0] for moment in moments}


def test_a_run_that_fails_is_closed_and_not_ended(tmp_path):
    told = tmp_path / "told"
    spoil = partial(witnessed, told=told, fails_in=2)
    (ended,) = run_pretrain(1, MOCK, spoil=spoil)
    assert ended.code == 2 and "the witness has seen too much" in ended.err
    assert moments_in(told)[-3:] == ["between_steps", "step_began", "closed"]


def test_answers_happen(run):
    _, out, folder = run
    assert "training ended: the witness has seen enough; 4 steps" in out
    assert run_file(folder, LAST)["progress"]["skipped_steps"] == 1
    assert [record["params_norm"] for record in records(folder)] == [7.0, 7.0]


def test_a_step_that_runs_again_has_the_same_bits(run, tmp_path):
    """The weights before the update that was left out are those of a run without an observer."""
    train(1, [*RUN, "--exit-interval", AGAIN, "--save", tmp_path])
    assert losses(tmp_path)[AGAIN] == losses(run[2])[AGAIN]
    assert same_bits(saved_state(tmp_path, AGAIN), saved_state(run[2], AGAIN))


def test_state_is_in_the_checkpoint(run):
    assert run_file(run[2], LAST)["witness"] == {"step": LAST}


def test_all_observers_are_told():
    """The one object that stands for all of them leaves out no moment."""
    assert set(MOMENTS) <= set(vars(observers.Observers))


FEATURES = "spike rerun profil straggler timer wandb tasks trace noise autotun kernel_ drop_ watched".split()


def test_places_order_the_observers_of_features(monkeypatch):
    """What decides about a step is called before what has no place, and what measures it is innermost."""

    def made(place):
        observer = Observer()
        observer.place = place
        return lambda config: observer

    makers = [made(INNERMOST), made(0), made(FIRST), made(0)]
    monkeypatch.setattr(
        observers, "features", lambda: [Feature("placed", observers=makers)]
    )
    found = [observer.place for observer in observers.observers_of(None)._all]
    # Around them stand those that every run has.
    assert found == [0, FIRST, 0, 0, INNERMOST, 0, 0]


def test_the_trainer_names_no_feature():
    source = Path(trainer.__file__).read_text()
    named = [word for word in FEATURES if re.search(word, source, re.IGNORECASE)]
    assert named == []
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if not isinstance(node, ast.Load | ast.Store | ast.Del)
    ]
    assert len(nodes) < 1200
