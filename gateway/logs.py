"""Where the log's lines go: to standard output, and never in a request's way. A disk that is full takes no line; what
would have been said is counted, and told with the first line that is taken again."""

from __future__ import annotations

import logging
import os

import structlog

STDOUT = 1


class LossyLines:
    """A logger of structlog's, whose every method writes one line; it raises nothing that the system says."""

    def __init__(self, descriptor: int = STDOUT) -> None:
        self._descriptor = descriptor
        self._lost = 0

    def __call__(self, *_: object) -> LossyLines:
        """As the factory of itself: all loggers write here, and count together."""
        return self

    def msg(self, message: str) -> None:
        told = f"{self._lost} lines of this log were lost\n" if self._lost else ""
        try:
            os.write(self._descriptor, f"{told}{message}\n".encode(errors="backslashreplace"))
        except OSError:
            self._lost += 1
        else:
            self._lost = 0

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def write_log(level: str) -> None:
    """From now on, lines of that severity or more, of the whole process."""
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if level != "debug":
        for name in ("alembic", "uvicorn"):
            logging.getLogger(name).setLevel(logging.WARNING)
    severity = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(severity), logger_factory=LossyLines())
