"""What the README tells a newcomer to type, typed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_python_examples_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec("import torch\nfrom bruno.flow import Bijection\n" + BLOCKS[block], {})
