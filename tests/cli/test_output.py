"""Output that is escaped, closed, full or cannot be encoded, and signals."""

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bruno.cli.output import console, prepare_streams, print_message, print_result
from bruno.reporting.results import Result
from bruno.text import printable
from cli.commandline import make_images, run, run_main

NASTY = "a\x1b[31m\nb\r\x07.png"
LATIN = os.fsdecode(b"caf\xe9.png")  # not UTF-8


@given(st.text())
def test_printable_text_is_one_line_without_control_characters(text):
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()
    assert not text.isprintable() or shown == text


def test_a_message_is_one_line(capsys):
    print_message("error", f"{NASTY}: must be [bold]", "red")
    assert capsys.readouterr().err == "error: a\\x1b[31m\\nb\\r\\x07.png: must be [bold]\n"


@pytest.mark.parametrize("name", [NASTY, LATIN])
def test_elements_of_any_name_are_read_and_their_names_escaped(tiny, name, capsys):
    make_images({"a": 3}, 8)
    Path("images/a/1.png").rename(Path("images/a", name))
    ended = run_main(capsys, "anomaly", "watch", "run", "images/a", "--threshold", "0")
    assert ended.code == 0, ended.errors
    assert printable(name) in ended.out
    assert "\x1b" not in ended.out
    assert run_main(capsys, "report", "run").code == 0


@pytest.mark.parametrize("name", [NASTY.replace(".png", ""), LATIN.removesuffix(".png")])
def test_classes_and_folders_of_any_name_are_trained_on_and_classified(workplace, name, capsys):
    make_images({"x": 4, "y": 4, "z": 4}, 8, folder=name)
    Path(name, "x").rename(Path(name, name))
    small = ["--set", "flow.units=8", "--set", "flow.couplings=2", "--validate", "0", "--device", "cpu"]
    train = ["train", "digits", "--set", f"data.name={name}", "--out", "run", "--steps", "1", *small]
    for arguments in (train, ["classify", "run", Path(name, "y"), "--support", name], ["report", "run"]):
        ended = run_main(capsys, *arguments)
        assert ended.code == 0, ended.errors
        assert "\x1b" not in ended.out + ended.errors
    assert printable(name) in run_main(capsys, "classify", "run", Path(name, "y"), "--support", name).out


@pytest.mark.parametrize("command", [["sample", "run", "--prior"], ["inspect", "run", "--sets", "2"]])
def test_results_are_saved_before_they_are_printed(tiny, monkeypatch, capsys, command):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    run(*command)
    expected = {path.name for path in Path("run/results").iterdir()}
    shutil.rmtree("run/results")
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", Full())
        ended = run_main(capsys, *command)
    assert ended.code == 1
    assert re.fullmatch(r"error: .*No space left.*\n", ended.errors)
    assert {path.name for path in Path("run/results").iterdir()} == expected


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", narrow)
    prepare_streams()
    print("8 × 8")
    narrow.flush()
    assert narrow.buffer.getvalue() == b"8 \\xd7 8\n"


def started(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, **options
    )


@pytest.mark.parametrize("closed", ["0", "1", "2", "0, 1, 2"])
def test_closed_streams_are_not_an_error(closed):
    close = f"import os, sys\nfor n in ({closed},): os.close(n)\n"
    ended = started("-c", close + "os.execv(sys.executable, [sys.executable, '-m', 'bruno', 'presets'])")
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "bruno", "presets", "omniglot"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


SEND_DURING_IMPORT = """
import importlib.abc, os, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "rich":
            os.kill(os.getpid(), {number})

import bruno.__main__
sys.meta_path.insert(0, Interrupting())
sys.argv = ["bruno", "presets"]
bruno.__main__.main()
"""
SEND_DURING_RUN = """
import os, sys
import bruno.__main__, bruno.cli.main
bruno.cli.main.main = lambda: os.kill(os.getpid(), {number})
bruno.__main__.main()
"""


@pytest.mark.parametrize("code", [SEND_DURING_IMPORT, SEND_DURING_RUN])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_time_is_an_exit_code_without_a_traceback(code, number):
    ended = started("-c", code.format(number=int(number)))
    assert ended.returncode == 128 + number
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LOCAL_RANK", "abc"),
        ("RANK", "abc"),
        ("WORLD_SIZE", "abc"),
        ("RANK", "1"),  # it would wait for the others for ever
        ("MASTER_PORT", "abc"),
        ("MASTER_PORT", "99999"),
        ("MASTER_ADDR", ""),
    ],
)
def test_a_bad_variable_of_torchrun_is_named(workplace, monkeypatch, capsys, variable, value):
    valid = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, number in {**valid, "MASTER_PORT": "29500", variable: value}.items():
        monkeypatch.setenv(name, number)
    ended = run_main(capsys, "train", "digits", "--out", "run", "--device", "cpu", "--steps", "1")
    assert ended.code == 2
    assert re.fullmatch(rf"error: .*`{variable}` .*got .*{value}.*\n", ended.errors)


def test_a_message_that_quotes_a_long_name_is_shortened(workplace, capsys):
    ended = run_main(capsys, "train", "digits", "--data", "a" * 100_000)
    assert ended.code == 2
    assert len(ended.errors) < 3000
    assert "…" in ended.errors


def test_a_rank_that_is_not_a_number_does_not_silence_the_program():
    ended = started("-m", "bruno", "presets", env={**os.environ, "RANK": "abc"})
    assert "digits" in ended.stdout


def test_running_out_of_memory_is_one_line(tiny, monkeypatch, capsys):
    def exhausted(*arguments, **options):
        np.empty(2**62, np.uint8)

    monkeypatch.setattr("bruno.trained.Trained.evaluate", exhausted)
    ended = run_main(capsys, "evaluate", "run")
    assert ended.code == 2
    assert re.fullmatch(r"error: out of memory.*\n", ended.errors)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_tables_do_not_wrap_inside_numbers_or_words(monkeypatch, capsys, width):
    names = [f"column_{i}" for i in range(24)]
    numbers = [f"{1234.5 * 7**i:.4g}" for i in range(24)]
    rows = (("out-of-distribution", *numbers), ("a name of several words", *numbers))
    monkeypatch.setattr(console, "_width", width)
    console.print()  # what an earlier test has left in the buffer of the console
    capsys.readouterr()
    print_result(Result("wide", "A wide table", {}, ("row", *names), rows))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in re.split(r"[\s│┃]+", line)}
    assert {"out-of-distribution", *names, *numbers} <= words
    assert lines[0].strip() == "A wide table"


def test_a_narrow_table_is_one_table_and_long_words_are_folded(monkeypatch, capsys):
    monkeypatch.setattr(console, "_width", 60)
    path = "/" + "/".join(["folder"] * 12)
    print_result(Result("paths", "Paths", {}, ("file", "words"), ((path, "some words " * 5),)))
    output = capsys.readouterr().out
    assert output.count("┏") == 1
    cells = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")]
    assert "".join(cells) == path
