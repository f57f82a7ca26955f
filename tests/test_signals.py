import signal
import subprocess
import sys
import threading

import pytest

from bruno.signals import StopSignal

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def _handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@BOTH
def test_the_first_signal_is_recorded_and_the_work_continues(number):
    with StopSignal() as stop:
        assert stop.number == 0
        signal.raise_signal(number)
        assert stop.number == number


def test_the_second_signal_goes_to_the_previous_handler():
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
    signal.signal(signal.SIGINT, before)


@BOTH
def test_a_signal_may_interrupt_instead(number):
    with pytest.raises(KeyboardInterrupt) as raised, StopSignal(interrupt=True) as stop:
        signal.raise_signal(number)
    assert raised.value.args == (number,)
    assert stop.number == number


def test_work_within_an_interruptible_part_can_be_protected():
    with StopSignal(interrupt=True) as outer:
        with StopSignal() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.number, inner.number) == (0, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_other_threads_handle_no_signals():
    numbers = []

    def work():
        with StopSignal() as stop:
            numbers.append(stop.number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert numbers == [0]


IMPORTING = """
from bruno.signals import handle_signals, stop
handle_signals(stop)
try:
    import swallowing
finally:
    print("went on")
"""
SWALLOWING = """
import os
try:
    os.kill(os.getpid(), NUMBER)
except BaseException:
    pass
"""


@BOTH
def test_a_signal_during_an_import_that_ignores_exceptions_ends_the_process(tmp_path, number):
    (tmp_path / "swallowing.py").write_text(SWALLOWING.replace("NUMBER", str(int(number))))
    ended = subprocess.run([sys.executable, "-c", IMPORTING], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (128 + number, "")
