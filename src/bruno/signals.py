"""SIGINT and SIGTERM: finish the work in progress first, or raise KeyboardInterrupt."""

from __future__ import annotations

import signal
import threading
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
