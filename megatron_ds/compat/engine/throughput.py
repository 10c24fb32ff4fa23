"""`Throughput`: DeepSpeed's `engine.tput_timer`, which measures without waiting for the device."""

import time


class Throughput:
    """Counts micro-batches and updates of training, and their time on the host.

    start_step        updates before the first one that is measured
    steps_per_output  always None: "steps_per_print" prints the lines of progress
    """

    steps_per_output = None

    def __init__(self, batch_size: int, start_step: int = 2):
        self.batch_size = batch_size
        self.start_step = start_step
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._began = None

    def update_epoch_count(self) -> None:
        """Begin an epoch, whose micro-batches are counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins, unless it has begun."""
        self._began = time.perf_counter() if self._began is None else self._began

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch is over. global_step: and an update; report_speed: no effect"""
        if self._began is None:
            return
        measured = self.global_step_count >= self.start_step
        self.total_elapsed_time += (
            time.perf_counter() - self._began if measured else 0.0
        )
        self._began = None
        self.micro_step_count += 1
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """Mean samples per second so far; 0 before there is a measurement."""
        steps = self.global_step_count - self.start_step
        return (
            self.batch_size * steps / self.total_elapsed_time
            if self.total_elapsed_time
            else 0.0
        )
