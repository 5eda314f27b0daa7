"""Errors a user can meet. The class decides the exit status of the rank; the message says what, where and what to do.

Exit statuses: 2 configuration or usage; 3 data or checkpoint cannot be used; 4 a save that had to succeed did not;
1 anything else. 0 is a finished run or one that stopped as asked.
"""

from __future__ import annotations


class MegaliteError(Exception):
    """Base of every error that is explained to the user instead of shown as a traceback."""

    exit_status = 1


class ConfigError(MegaliteError):
    """A setting is unknown, malformed, or contradicts another one."""

    exit_status = 2


class DataError(MegaliteError):
    """A data file is missing, damaged, or does not fit the model."""

    exit_status = 3


class CheckpointError(MegaliteError):
    """A checkpoint is missing, incomplete, damaged, hostile, or does not fit the run."""

    exit_status = 3


class DamagedCheckpointError(CheckpointError):
    """The files of a step are missing, incomplete or not what was written.

    It is never about what the run asks for, so that another step of the same run may be as good as this one was.
    """


class TopologyMismatchError(CheckpointError):
    """A checkpoint cannot be loaded at the present TP/PP/DP sizes."""


class SaveError(MegaliteError):
    """A checkpoint that had to be written could not be."""

    exit_status = 4


class NumericsError(MegaliteError):
    """The loss or a gradient is not finite."""


class PeerError(MegaliteError):
    """Another rank failed; raised here so that nobody waits for it. Carries that rank's exit status."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status
