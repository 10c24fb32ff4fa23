"""The error tree. Catch `MegatronDSError` to catch everything this package raises on purpose.

    MegatronDSError
      ConfigError            a configured value or argument is not valid     (also ValueError)
        ArgumentError        arguments of an engine do not fit together    (also AssertionError)
      LayoutError            sizes do not divide, shards do not cover         (also ValueError)
      ScheduleError          an instruction list is not valid
      CheckpointError        missing, incomplete, or written by another model
        MismatchError        of another run or model: each start of the command ends alike
      DataError              a corpus or an index is missing, damaged or empty
      CommunicationError     a peer exited, did not answer, or sent another tensor
        MeetingError         a rank came twice, or another job meets at the address: each start ends alike
      DeviceMemoryError      the run does not fit on a rank's device
      StorageError           offloaded state could not be written or read
      KernelError            a GPU kernel did not compile, load or start
      CallError              a method of an engine was called at the wrong time (also AssertionError)
      LedgerError            a loss term or metric of a layer would be lost
      NotInitializedError    mpu used before `initialize_model_parallel`

A message states what is wrong with the numbers, why it matters, and what to do.
"""


class MegatronDSError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(MegatronDSError, ValueError):
    """A value in the configuration, or an argument of a call, is not valid."""


class ArgumentError(ConfigError, AssertionError):
    """Arguments of an engine's call are missing or contradict each other; DeepSpeed asserts these."""


class LayoutError(MegatronDSError, ValueError):
    """Sizes are not divisible, or shards do not cover their tensor once."""


class ScheduleError(MegatronDSError):
    """An instruction list is not valid."""


class CheckpointError(MegatronDSError):
    """A checkpoint is missing, incomplete, or belongs to another model."""


class MismatchError(CheckpointError):
    """A folder holds another run or model than the command asks for. A restart has the same error."""


class DataError(MegatronDSError):
    """A corpus or an index file is missing, damaged or empty."""


class CommunicationError(MegatronDSError):
    """A peer, whose rank is in the message, exited, did not answer, or sent another tensor."""


class MeetingError(CommunicationError):
    """A process cannot meet the others: they contradict it, or belong to another job. A restart has the same
    error."""


class DeviceMemoryError(MegatronDSError):
    """The model, or the activations of a step, do not fit on the device of a rank."""


class StorageError(MegatronDSError):
    """Offloaded state could not be written to its scratch file, or read back."""


class KernelError(MegatronDSError):
    """A GPU kernel could not be compiled, loaded or started."""


class CallError(MegatronDSError, AssertionError):
    """A method of an engine was called at a time when it cannot work; DeepSpeed asserts these."""


class LedgerError(MegatronDSError):
    """A layer adds a loss term or a metric where it would be neither trained nor reported."""


class NotInitializedError(MegatronDSError):
    """`mpu` was used before `initialize_model_parallel`."""
