"""`bruno presets` and `bruno data`."""

import pytest
import torch

from bruno import Bruno
from bruno.config import load_recipe, presets
from bruno.data import DATASETS, Examples
from cli.commandline import run


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_recipe(name):
    recipe = load_recipe(name)
    assert (recipe.data.name in DATASETS) != (name in ("images", "table"))  # these two are for user data
    assert load_recipe(name, ["process.kind=gaussian"]).process.kind == "gaussian"


def test_the_omniglot_model_fits_into_16_megabytes_in_8_bits():
    model = Bruno.from_config(load_recipe("omniglot").model((1, 28, 28), 256))
    assert sum(p.numel() for p in model.parameters()) <= 15_000_000


def test_presets_are_listed_with_all_their_settings():
    assert "omniglot-paper" in run("presets")
    settings = run("presets", "digits").splitlines()
    assert settings[0].split()[0] == 'data.name="digits"'
    assert load_recipe("omniglot", settings) == load_recipe("digits")  # all settings, in the form of --set


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """The lines that `bruno data` prints about a folder, on a narrow terminal."""
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "40")
    return lambda: run("data", "--data-dir", tmp_path).splitlines()


def test_a_missing_file_is_listed_with_its_folder_and_uncut_addresses(listed, tmp_path):
    lines = listed()
    for name, source in DATASETS.items():
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert line.split()[1] == ("missing" if source.files else "built")
        for remote in source.files:
            file = remote.path.rsplit("/")[-1]
            place = lines.index(f"    put {file} into {(tmp_path / remote.path).parent}/", lines.index(line))
            addresses = lines[place + 1 : place + 1 + len(remote.mirrors)]
            assert [text.split()[-1] for text in addresses] == [*remote.mirrors]


def test_an_available_dataset_is_one_line_with_its_folder(listed, tmp_path):
    for remote in DATASETS["mnist"].files:
        (tmp_path / remote.path).parent.mkdir(exist_ok=True)
        (tmp_path / remote.path).touch()
    Examples(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([0]), ("0",)).save(
        tmp_path / "cifar10.npz"
    )
    lines = listed()
    [mnist, fashion] = [i for i, line in enumerate(lines) if line.startswith(("mnist ", "fashion-mnist "))]
    assert lines[mnist].split()[1] == "available"
    assert lines[mnist].endswith(f", in {tmp_path / 'mnist'}")
    assert fashion == mnist + 1
    assert any(line.startswith("cifar10 ") and line.endswith(str(tmp_path / "cifar10.npz")) for line in lines)
