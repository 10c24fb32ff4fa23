"""Files that ask a run to save or to exit: --kill-switch-path and --trigger-path."""

from pathlib import Path

from ..config.options.training_options import TrainConfig


def exit_file(train: TrainConfig) -> str | None:
    """The file that asks for the end of the run, if it exists."""
    folder = Path(train.trigger_path) / "exit" if train.trigger_path else None
    for path in (train.kill_switch_path, folder):
        if path is not None and Path(path).exists():
            return str(path)
    return None


def take_save_file(train: TrainConfig) -> bool:
    """Whether the file that asks for a checkpoint exists. It is removed."""
    path = Path(train.trigger_path or "") / "save"
    if not train.trigger_path or not path.exists():
        return False
    path.unlink(missing_ok=True)
    return True
