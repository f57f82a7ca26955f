"""What the README tells a newcomer to type, typed."""

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_python_examples_run(block, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(README.parent / "examples")
    monkeypatch.chdir(tmp_path)
    exec("import torch\nfrom bruno.flow import Bijection\n" + BLOCKS[block], {})


def test_the_table_of_omniglot_is_what_was_measured():
    table = runpy.run_path(str(README.parent / "benchmarks" / "omniglot.py"))["table"]()
    assert table in README.read_text()
