"""The examples of docs/service.md that use curl; those in Python run with the other pages."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bruno.serving import running

ROOT = Path(__file__).parents[2]
LINES = re.findall(r"^curl .+$", (ROOT / "docs" / "service.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt install curl")
def test_lines_with_curl_run(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with running(["omniglot-small"], store=":memory:") as address:
        answers = []
        for line in LINES:
            here = line.replace("localhost:8000/", address)
            here = here.replace("curl ", "curl -sS -m 120 --fail-with-body ", 1)
            ended = subprocess.run(here, shell=True, cwd=tmp_path, capture_output=True, text=True)
            assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
            answers.append(ended.stdout)
    assert '"labels":["a"]' in answers[2]
    assert (tmp_path / "more.png").read_bytes().startswith(b"\x89PNG")
    assert answers[-1] == '{"model":"omniglot-small","id":"a","count":1}'
