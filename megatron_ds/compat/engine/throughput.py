"""`Throughput`: DeepSpeed's `engine.tput_timer`, which measures without waiting for the device."""

import time


class Throughput:
    """Counts micro-batches and updates of training, and their time on the host.

    start_step        updates before the first one that is measured
    steps_per_output  always None: "steps_per_print" prints the lines of progress
    initialized, started      whether any micro-batch has begun, and whether one is under way
    start_time, end_time      of the last one that is measured, in seconds of time.perf_counter; 0 before
    step_elapsed_time         of the micro-batches of the current update so far
    """

    steps_per_output = None

    def __init__(self, batch_size: int, start_step: int = 2):
        self.batch_size = batch_size
        self.start_step = start_step
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.start_time = self.end_time = 0.0
        self.initialized = self.started = False

    def update_epoch_count(self) -> None:
        """Begin an epoch, whose micro-batches are counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins, unless it has begun."""
        self.initialized = True
        if not self.started and self.global_step_count >= self.start_step:
            self.start_time = time.perf_counter()
        self.started = True

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch is over. global_step: and an update; report_speed: no effect"""
        if not self.started:
            return
        self.started = False
        if self.start_time:
            self.end_time = time.perf_counter()
            passed = self.end_time - self.start_time
            self.total_elapsed_time += passed
            self.step_elapsed_time += passed
        self.micro_step_count += 1
        self.global_step_count += global_step
        if global_step:
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Mean samples per second so far; 0 before there is a measurement."""
        steps = self.global_step_count - self.start_step
        return (
            self.batch_size * steps / self.total_elapsed_time
            if self.total_elapsed_time
            else 0.0
        )
