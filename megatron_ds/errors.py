"""The error tree. Catch `MegatronDSError` to catch everything this package raises on purpose.

    MegatronDSError
      ConfigError            the user asked for something impossible          (also ValueError)
      LayoutError            sizes do not divide, shards do not cover         (also ValueError)
      ScheduleError          an instruction list is not legal
      CheckpointError        missing, incomplete, or written by another model
      DataError              a corpus or an index is missing, damaged or empty
      CommunicationError     a peer died, never answered, or meant another tensor
      DeviceMemoryError      the run does not fit on a rank's device
      StorageError           a disk failed under what was moved out to it
      NotInitializedError    mpu used before `initialize_model_parallel`

A message says what was wrong with the numbers, why it matters, and what to do.
"""


class MegatronDSError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(MegatronDSError, ValueError):
    """The user asked for something impossible."""


class LayoutError(MegatronDSError, ValueError):
    """Sizes do not divide, or shards do not cover what they should."""


class ScheduleError(MegatronDSError):
    """An instruction list is not legal."""


class CheckpointError(MegatronDSError):
    """A checkpoint is missing, incomplete, or belongs to another model."""


class DataError(MegatronDSError):
    """A corpus or an index file is missing, damaged or empty."""


class CommunicationError(MegatronDSError):
    """A peer died, never answered, or meant another tensor; names the ranks and what was expected."""


class DeviceMemoryError(MegatronDSError):
    """The model, or the activations of a step, do not fit on the device of a rank."""


class StorageError(MegatronDSError):
    """What was moved out to a scratch file could not be written, or read back."""


class NotInitializedError(MegatronDSError):
    """`mpu` was used before `initialize_model_parallel`."""
