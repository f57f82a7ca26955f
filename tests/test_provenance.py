import shutil
import subprocess

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
