"""Writing the page, and the message where it was not built."""

import json
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from urllib.request import urlopen

import pytest
from cli.commandline import run_main
from typer.testing import CliRunner

from bruno.cli.main import app
from bruno.page import serve_page, write_page
from bruno.page.files import BUILT, STATIC

ROOT = Path(__file__).parents[2]


def test_a_page_that_is_not_built_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr("bruno.page.files.BUILT", tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="make page"):
        write_page(tmp_path / "out")


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A folder of built files that has only their list."""
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "page.json").write_text(json.dumps({"page": [path.name for path in STATIC.iterdir()]}))
    monkeypatch.setattr("bruno.page.files.BUILT", folder)
    return folder


def test_the_command_writes_the_page_with_all_that_was_built(tmp_path, built):
    outcome = CliRunner().invoke(app, ["page", "--out", str(tmp_path / "out")])
    assert outcome.exit_code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"index.html", "main.js", "worker.js", "style.css", "page.json"} <= names


@pytest.fixture
def visited(monkeypatch):
    """The addresses opened in a browser, and what the one visitor got; the visit ends the server."""
    opened, asked = [], []
    monkeypatch.setattr("webbrowser.open", opened.append)

    def serve_one_request(server):
        client = threading.Thread(target=lambda: asked.append(urlopen(opened[0]).read()))
        client.start()
        server.handle_request()
        client.join()
        raise KeyboardInterrupt

    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", serve_one_request)
    return opened, asked


def test_the_command_opens_the_page_in_the_browser(built, visited, capsys):
    opened, asked = visited
    ended = run_main(capsys, "page", "--open")
    assert ended.code == 130  # as after Ctrl-C
    assert opened[0] in ended.out
    assert asked == [(STATIC / "index.html").read_bytes()]


def test_without_a_folder_the_page_is_served_from_a_temporary_one(built, visited, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.raises(KeyboardInterrupt):
        serve_page(open=True)
    assert visited[1] == [(STATIC / "index.html").read_bytes()]
    assert not any((tmp_path / "temporary").iterdir())


def test_a_page_of_another_version_says_how(tmp_path, monkeypatch):
    (tmp_path / "page.json").write_text(json.dumps({"page": ["index.html"]}))
    monkeypatch.setattr("bruno.page.files.BUILT", tmp_path)
    with pytest.raises(FileNotFoundError, match="make page"):
        write_page(tmp_path / "out")


def test_the_first_visit_downloads_at_most_12_megabytes():
    if not BUILT.is_dir():
        pytest.skip("the page is not built. Build it with: make page")
    contents = json.loads((BUILT / "page.json").read_text())
    first = next(iter(contents["models"].values()))
    loaded = [contents["runtime"]["bytes"], *(file["bytes"] for file in first["files"].values())]
    unpacked = [path for path in (*STATIC.iterdir(), *BUILT.iterdir()) if path.suffix != ".gz"]
    assert 2e6 < sum(loaded) + sum(path.stat().st_size for path in unpacked) <= 12e6


@pytest.mark.slow
def test_a_wheel_contains_the_page(tmp_path):
    if not BUILT.is_dir():
        pytest.skip("the page is not built. Build it with: make page")
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("node_modules", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in (STATIC, BUILT):
        assert {f"bruno/page/{folder.name}/{path.name}" for path in folder.iterdir()} <= names


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`out` .*file"):
        write_page(tmp_path / "file")


def test_one_of_the_options_is_needed():
    assert CliRunner().invoke(app, ["page"]).exit_code == 2
