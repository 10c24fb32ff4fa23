"""`KernelProfile`: what runs on host and device in a few steps, by torch's profiler or by Nsight Systems.

Instructions of the pipeline appear in it by their names, such as F3@1 (forward of micro-batch 3 at stage 1).
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...host import places
from ...pipeline.executor import Executor
from ...training.moments import RunStart
from ...training.observe.sink import reason_of
from ...training.observer import LAST, Observer
from .options import ProfilerConfig

logger = logging.getLogger(__name__)


class KernelProfile:
    """Profiles the steps after --profile-step-start and up to --profile-step-end on --profile-ranks.

    Steps are those of the run, counted from 1: a run that resumes after them profiles nothing. Evaluations and
    checkpoints between these steps are in the profile. Outside of it nothing is recorded and nothing costs time.
    """

    def __init__(self, config: ProfilerConfig, executor: Executor, rank: int):
        self._executor = executor
        self._rank = rank
        self._folder = Path(config.profile_dir)
        self._uses_torch = config.use_pytorch_profiler
        is_wanted = config.profile and rank in config.profile_ranks
        self._first = config.profile_step_start + 1 if is_wanted else 0
        self._last = config.profile_step_end if is_wanted else -1
        self._profile: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context around a training step, counted from 1. The trace is written after the last one."""
        if not self._first <= step <= self._last:
            yield
            return
        # Start with the window, or in its middle if the run resumed there.
        if self._executor.ranges is None:
            self._start()
        try:
            yield
        except BaseException:
            self._stop()
            raise
        if step == self._last:
            self.finish()

    def finish(self) -> None:
        """Stop, and write the trace: a run may end within the window."""
        if self._executor.ranges is None:
            return
        # Millions of events take minutes, in which this rank trains nothing.
        with places.phase(places.EXPORTING):
            finished = self._stop()
            if finished is not None:
                self._write(finished)

    def _start(self) -> None:
        if not self._uses_torch:
            self._executor.ranges = torch.cuda.nvtx.range
            torch.cuda.profiler.start()
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._executor.ranges = record_function
        self._profile = profile(activities=activities)
        self._profile.start()

    def _stop(self) -> profile | None:
        """Return the torch profile that ended, if there was one."""
        self._executor.ranges = None
        finished = self._profile
        self._profile = None
        if finished is not None:
            finished.stop()
        elif not self._uses_torch:
            torch.cuda.profiler.stop()
        return finished

    def _write(self, finished: profile) -> None:
        path = self._folder / f"profile-rank-{self._rank}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning(
                "cannot write %s: %s. Training continues without this profile.",
                path,
                reason_of(error) if isinstance(error, OSError) else error,
            )
            return
        logger.info("wrote %s: open it in https://ui.perfetto.dev", path)


class ProfiledKernels(Observer):
    """--profile: what runs on host and device in a few steps."""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Prepare the profile."""
        replica = start.replica
        self._profile = KernelProfile(
            start.config.of(ProfilerConfig), replica.executor, replica.mesh.rank
        )

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Profile the step, if it is in the window."""
        return self._profile.step(step)

    def closed(self) -> None:
        """Write the trace of a window in which the run ended."""
        self._profile.finish()
