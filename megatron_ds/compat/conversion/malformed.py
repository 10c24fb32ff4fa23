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
    """Return `read(folder, …)` with a CheckpointError for each value of the wrong kind that it does not check
    itself."""

    @wraps(read)
    def checked(folder: Path, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(folder, *args, **kwargs)
        except ConfigError as error:  # the files hold a value that our options refuse
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
