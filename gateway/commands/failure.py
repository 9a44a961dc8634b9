"""How a command ends that could not do what it was asked: what, why and what to do, and an exit code for scripts."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """docs/commands.md lists these; 0 is success, 1 a defect of ours, 2 a command line that cannot be read."""

    SETTINGS = 3
    ADDRESS = 4  # host and port cannot be listened on
    DATABASE = 5
    MODEL = 6
    REFUSED = 7  # the gateway answered with an error
    UNREACHABLE = 8  # no gateway answered
    ENGINE = 9  # the embedded engine did not start


class CommandFailed(Exception):
    """`message` is told to the user as it is, on standard error."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
