"""Values of kinds that no program writes: files of other programs may hold anything."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ConfigError, MegatronDSError

# What operations on a value raise where it is not a number, table or tensor.
WRONG_KIND = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def refuses_malformed(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read(folder, …)`, which raises CheckpointError also where it does not check a value that is wrong."""

    @wraps(read)
    def checked(folder: Path, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(folder, *args, **kwargs)
        except ConfigError as error:  # of an option in the files
            raise CheckpointError(f"{folder}, options in its files: {error}") from error
        except MegatronDSError:
            raise
        except WRONG_KIND as error:
            raise CheckpointError(
                f"{folder}: a value in its files is of another kind than the program "
                f"writes there ({type(error).__name__}: {error}). A file is damaged, or "
                "of a version that is not known."
            ) from error

    return checked
