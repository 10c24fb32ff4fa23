"""Files that ask a run to save or to exit: --kill-switch-path and --trigger-path."""

from pathlib import Path

from ..config.options.training import TrainConfig


def exit_file(train: TrainConfig) -> str | None:
    """Return the file that asks for the end of the run, if it exists."""
    paths: list[str | Path] = []
    if train.kill_switch_path is not None:
        paths.append(train.kill_switch_path)
    if train.trigger_path:
        paths.append(Path(train.trigger_path) / "exit")
    for path in paths:
        if Path(path).exists():
            return str(path)
    return None


def take_save_file(train: TrainConfig) -> bool:
    """Return whether the file that asks for a checkpoint exists. It is removed."""
    if not train.trigger_path:
        return False
    path = Path(train.trigger_path) / "save"
    if not path.exists():
        return False
    path.unlink(missing_ok=True)
    return True
