import shutil
import subprocess

import bruno.provenance
from bruno.provenance import provenance


def test_the_commit_is_that_of_this_source_and_not_of_another_repository(tmp_path, monkeypatch):
    monkeypatch.delenv("BRUNO_COMMIT", raising=False)
    (tmp_path / ".venv").mkdir()
    for name in ("theirs.py", ".venv/provenance.py"):
        (tmp_path / name).touch()
    if shutil.which("git"):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init"], ["add", "theirs.py"], [*who, "commit", "-m", "theirs"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr("bruno.provenance.__file__", str(tmp_path / ".venv" / "provenance.py"))
    assert provenance(0)["commit"] is None


def test_the_commit_is_that_of_the_start_of_the_process(monkeypatch):
    monkeypatch.delenv("BRUNO_COMMIT", raising=False)
    before = provenance(0)["commit"]
    monkeypatch.setattr(
        bruno.provenance.subprocess, "check_output", lambda *arguments, **options: "another commit"
    )
    assert provenance(0)["commit"] == before
    monkeypatch.setenv("BRUNO_COMMIT", "abc")
    assert provenance(0)["commit"] == "abc"
