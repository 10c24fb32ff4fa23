"""--profile: every instruction of the profiled steps is in the trace by its name, none of another step."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.profiler.kernel_profile import KernelProfile
from megatron_ds.extensions.profiler.options import ProfilerConfig
from megatron_ds.extensions.profiler.output_check import check_profile
from megatron_ds.host import places
from megatron_ds.host.place_file import PlaceWriter, read_places
from tests.harness.pretraining import GLOBAL_BATCH, MOCK, train

pytestmark = pytest.mark.processes

PROFILE = ["--profile", "--use-pytorch-profiler"]


def names_of(path) -> Counter:
    """How often each named range occurs in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(e["name"] for e in events if e.get("cat") == "user_annotation")


def test_without_a_gpu_the_marks_for_nsight_are_refused():
    with pytest.raises(ConfigError, match="Add --use-pytorch-profiler"):
        check_profile(ProfilerConfig(profile=True), torch.device("cpu"))


def test_every_instruction_of_the_steps_is_in_the_trace_of_the_wanted_rank(tmp_path):
    window = ["--profile-step-start", "2", "--profile-step-end", "4"]
    layout = ["--pipeline-model-parallel-size", "2"]
    folder = tmp_path / "profiles"
    where = ["--profile-ranks", "1", "--profile-dir", str(folder)]
    train(2, [*MOCK, *layout, *PROFILE, *window, *where])
    assert [path.name for path in folder.iterdir()] == ["profile-rank-1.json"]
    names = names_of(folder / "profile-rank-1.json")
    # two steps, in each a forward and a backward of every micro-batch at the last stage
    computed = {f"{op}{i}@1": 2 for op in "FB" for i in range(GLOBAL_BATCH)}
    assert {name: names[name] for name in computed} == computed
    instructions = {name: n for name, n in names.items() if name.endswith(("@1", "@0"))}
    assert set(instructions.values()) == {2}


def test_a_run_that_ends_within_the_window_writes_what_it_has(tmp_path):
    folder = tmp_path / "profiles"
    window = ["--profile-step-start", "5", "--profile-step-end", "9"]
    train(1, [*MOCK, *PROFILE, *window, "--profile-dir", str(folder)])
    assert names_of(folder / "profile-rank-0.json")["F0@0"] == 1


def test_the_export_of_a_trace_is_a_phase_of_its_own(tmp_path, monkeypatch):
    """It takes minutes for millions of events, in which no instruction begins."""
    writer = PlaceWriter(tmp_path / "places", {})
    writer.step(4)
    monkeypatch.setattr(places, "_writer", [writer])
    config = ProfilerConfig(
        profile=True, use_pytorch_profiler=True, profile_dir=str(tmp_path)
    )
    profile = KernelProfile(config, SimpleNamespace(ranges=None), 0)
    phases = []

    def export(self, path):
        phases.append(read_places(tmp_path / "places").places[-1].phase)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with profile.step(config.profile_step_start + 1):
        torch.ones(2).sum()
    profile.finish()
    phases.append(read_places(tmp_path / "places").places[-1].phase)
    assert phases == [places.EXPORTING, places.TRAINING]
