import os
import subprocess
import sys
from pathlib import Path

import pytest

from bruno.checkpoint import write
from bruno.files import atomic_write, check_replaceable, inside, parse_json

KILLED = """
import os, sys
from pathlib import Path
from bruno.files import atomic_write
with atomic_write(Path(sys.argv[1])) as beside:
    beside.write_text("half")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_temporary_files_of_a_killed_process_are_deleted(tmp_path):
    path = tmp_path / "a[1].json"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert killed.returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    with atomic_write(path) as beside:
        beside.write_text("whole")
    assert [file.name for file in tmp_path.iterdir()] == ["a[1].json"]


def test_temporary_files_of_running_processes_and_of_other_names_stay(tmp_path):
    path = tmp_path / "a"
    with atomic_write(path) as first:
        first.write_text("1")
        others = [tmp_path / ".a.b", tmp_path / ".a", first.with_name(first.name.replace(".a.", ".b."))]
        for other in others:
            other.touch()
        with atomic_write(path) as second:
            second.write_text("2")
        assert first.is_file()
    assert path.read_text() == "1"
    assert all(other.is_file() for other in others)


def test_a_path_inside_a_folder_may_be_a_link_within_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to("file")
    (tmp_path / "run" / "loop").symlink_to("loop")
    (tmp_path / "run" / "out").symlink_to("../secret")
    (tmp_path / "linked").symlink_to("run")
    for folder in (tmp_path / "run", tmp_path / "linked"):
        for name in ("new", "link", "loop"):
            assert inside(folder, name) == folder / name
        for name in ("out", "../secret", os.devnull):
            with pytest.raises(ValueError, match=r"must be within .*; got a link to "):
                inside(folder, name)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "\x00", b"\xff", "9" * 10_000])
def test_what_is_not_json_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_folders_pipes_and_devices_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", Path(os.devnull)):
        before = path.stat().st_ino
        with (
            pytest.raises(ValueError, match=rf"{path}: must be a regular file"),
            atomic_write(path) as beside,
        ):
            beside.write_text("new")
        assert path.stat().st_ino == before


def test_only_files_of_the_same_kind_are_replaced(tmp_path):
    page, table = tmp_path / "page.html", tmp_path / "rows.csv"
    check_replaceable(page, b"<html", "a page")
    page.write_text("<html>")
    table.write_text("a,b\n1,2\n")
    check_replaceable(page, b"<html", "a page")
    with pytest.raises(ValueError, match=r"`out` .*rows\.csv"):
        check_replaceable(table, b"<html", "a page")
    table.write_bytes(b"")
    check_replaceable(table, b"<html", "a page")


def test_a_file_that_cannot_be_written_is_named_without_its_temporary_name(tmp_path, monkeypatch):
    def denied(self, *arguments, **options):  # tests may run as root, which is never denied
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", denied)
    with pytest.raises(PermissionError) as error:
        write(tmp_path / "model.safetensors", {}, {})
    assert error.value.filename == str(tmp_path / "model.safetensors")
    with pytest.raises(PermissionError), atomic_write(tmp_path / "file"):
        pass
