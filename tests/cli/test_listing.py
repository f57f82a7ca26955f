"""`bruno data`: what it prints can be read and copied, at any width."""

import pytest
import torch
from typer.testing import CliRunner

from bruno.cli import app
from bruno.data import DATASETS, Examples


@pytest.fixture
def data(tmp_path, monkeypatch):
    """What `bruno data` says of a folder, on a narrow terminal."""
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "40")

    def lines() -> list[str]:
        result = CliRunner().invoke(app, ["data", "--data-dir", str(tmp_path)])
        assert result.exit_code == 0
        return result.output.splitlines()

    return lines


def test_a_missing_file_is_said_with_its_place_and_its_address_uncut(data, tmp_path):
    lines = data()
    for name, source in DATASETS.items():
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert line.split()[1] == ("missing" if source.files else "built")
        for remote in source.files:
            file = remote.path.rsplit("/")[-1]
            place = lines.index(f"    put {file} into {(tmp_path / remote.path).parent}/", lines.index(line))
            addresses = lines[place + 1 : place + 1 + len(remote.mirrors)]
            assert [text.split()[-1] for text in addresses] == [*remote.mirrors]


def test_what_is_there_is_one_line_with_its_place(data, tmp_path):
    for remote in DATASETS["mnist"].files:
        (tmp_path / remote.path).parent.mkdir(exist_ok=True)
        (tmp_path / remote.path).touch()
    Examples(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([0]), ("0",)).save(
        tmp_path / "cifar10.npz"
    )
    lines = data()
    [mnist, fashion] = [i for i, line in enumerate(lines) if line.startswith(("mnist ", "fashion-mnist "))]
    assert lines[mnist].split()[1] == "there"
    assert lines[mnist].endswith(f", in {tmp_path / 'mnist'}")
    assert fashion == mnist + 1
    assert any(line.startswith("cifar10 ") and line.endswith(str(tmp_path / "cifar10.npz")) for line in lines)
