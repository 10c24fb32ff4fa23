"""`KernelProfile`: what runs on host and device in a few steps, by torch's profiler or by Nsight Systems.

Instructions of the pipeline appear in it by their names, such as F3@1 (forward of micro-batch 3 at stage 1).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...config.options.profiler import ProfilerConfig
from ...errors import ConfigError
from ...host import places
from ...pipeline.executor import Executor
from .sink import reason_of

logger = logging.getLogger(__name__)


def check_profile(config: ProfilerConfig, device: torch.device) -> None:
    """Check the options against the device. Raises ConfigError."""
    if config.profile and not config.use_pytorch_profiler and device.type != "cuda":
        raise ConfigError(
            "--profile without --use-pytorch-profiler marks steps for Nsight Systems, which needs a GPU, and this "
            f"run is on {device.type}. Add --use-pytorch-profiler, which records the CPU, too."
        )


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
        """The torch profile that ended, if there was one."""
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
