"""SIGINT and SIGTERM: finish the work in progress first, raise KeyboardInterrupt, or leave.

`StopSignal` is for work of the library, in any program: it handles signals only while that work lasts.
`leave` and `stop` are the handlers of the program `bruno` itself, until it ends: a library must not exit.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Context manager that handles SIGINT and SIGTERM while its body runs.

    By default, the first signal is only recorded, so that the body can finish its work and check `number`.
    With ``interrupt=True``, it immediately raises ``KeyboardInterrupt(number)``: SIGTERM, which stops a
    service, then acts like Ctrl-C. In both cases, a second signal of the same kind goes to the
    previous handler. Outside the main thread, Python allows no handlers and this does nothing.

    Attributes:
        number: the signal received, 0 if none.
    """

    def __init__(self, *, interrupt: bool = False) -> None:
        self.number = 0
        self._interrupt = interrupt

    def __enter__(self) -> StopSignal:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = {n: signal.signal(n, self._handle) for n in (_NUMBERS if in_main_thread else ())}
        return self

    def __exit__(self, *exception: object) -> None:
        for number in self._before:
            self._restore(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore(signal.Signals(number))
        if self._interrupt:
            raise KeyboardInterrupt(number)

    def _restore(self, number: signal.Signals) -> None:
        before = self._before[number]
        signal.signal(number, signal.SIG_DFL if before is None else before)  # None: not set from Python


def handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Install a handler of SIGINT and SIGTERM."""
    for number in _NUMBERS:
        signal.signal(number, handler)


def leave(number: int, frame: FrameType | None) -> None:
    """Handle a signal: leave at once, with 128 + its number as the exit code."""
    os._exit(128 + number)


def stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise KeyboardInterrupt or SystemExit, or leave at once while modules are imported.

    Commands import modules when they need them. Some are imported by C code that ignores exceptions, so an
    exception would leave a half-imported module in use.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            leave(number, frame)
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
