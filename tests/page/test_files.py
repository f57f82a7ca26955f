"""Writing the page, and the message where it was not built."""

import pytest
from typer.testing import CliRunner

from bruno.cli.main import app
from bruno.page import write_page


def test_a_page_that_is_not_built_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr("bruno.page.files.BUILT", tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="make page"):
        write_page(tmp_path / "out")


def test_the_command_writes_the_page_with_all_that_was_built(tmp_path, monkeypatch):
    built = tmp_path / "built"
    built.mkdir()
    (built / "page.json").write_text("{}")
    monkeypatch.setattr("bruno.page.files.BUILT", built)
    outcome = CliRunner().invoke(app, ["page", "--out", str(tmp_path / "out")])
    assert outcome.exit_code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"index.html", "main.js", "worker.js", "style.css", "page.json"} <= names


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`out` .*file"):
        write_page(tmp_path / "file")


def test_one_of_the_options_is_needed():
    assert CliRunner().invoke(app, ["page"]).exit_code == 2
