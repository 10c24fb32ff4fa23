"""CSV files as DeepSpeed's monitor lays them out: one for each value, with rows of samples and value.

    DIR/Train_Samples_lr.csv          step,lr
                                      2048,0.0001
                                      4096,0.00012

The column "step" is the number of samples so far. The header is written once, when the file is made. A run
that resumes appends; of several rows of one x the last is valid.
"""

from collections.abc import Mapping
from pathlib import Path

from ...config import RunConfig
from ...training.observe.records import Record, TrainRecord
from ...training.observe.sink import AppendedFile
from .tensorboard import scalars_of

PREFIX = "Train/Samples/"
# Tag of TensorBoard → DeepSpeed's name, where it has one.
NAMES = {
    "lm loss": "train_loss",
    "learning-rate": "lr",
    "lm loss validation": "eval_loss",
}
# Phase → DeepSpeed's name of its time in ms.
TIMES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "optimizer": "step",
}


class CsvFiles:
    """Files of points; also a sink of points, for `Tolerant`."""

    def __init__(self, directory: Path):
        self.place = directory
        self._files: dict[str, AppendedFile] = {}

    def write(self, values: Mapping[str, float], x: int) -> None:
        """Append a row to the file of each tag, or raise OSError and leave that file as it was."""
        for tag, value in values.items():
            self._file(tag).append(f"{x},{value}\n".encode())

    def _file(self, tag: str) -> AppendedFile:
        if tag not in self._files:
            path = self.place / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            header = f"step,{tag.rpartition('/')[2]}\n".encode()
            self._files[tag] = AppendedFile(path, header=header, is_lines=True)
        return self._files[tag]


class CsvMonitor:
    """The sink for --csv-monitor-dir: values under DeepSpeed's names, others under those of TensorBoard with
    underscores."""

    def __init__(self, directory: Path):
        self.place = directory
        self._files = CsvFiles(directory)

    def write(self, record: Record) -> None:
        """Append the values of the record, or raise OSError."""
        losses, others = scalars_of(record, timers=False)
        named = {
            NAMES.get(tag, tag.replace("-", "_").replace(" ", "_")): value
            for tag, value in (losses | others).items()
        }
        if isinstance(record, TrainRecord):
            named |= {
                f"elapsed_time_ms_{name}": 1000 * max(record.times[phase].values())
                for phase, name in TIMES.items()
                if phase in record.times
            }
        self._files.write(
            {PREFIX + name: value for name, value in named.items()}, record.samples
        )


def made(config: RunConfig, run_id: str) -> CsvMonitor:
    """Return the sink of --csv-monitor-dir."""
    return CsvMonitor(Path(config.logging.csv_monitor_dir))


def points(config: RunConfig, run_id: str) -> CsvFiles:
    """Return the sink of points of --csv-monitor-dir."""
    return CsvFiles(Path(config.logging.csv_monitor_dir))
