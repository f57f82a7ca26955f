"""The examples of a recipe's splits, and a recipe that fits them."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from PIL import Image

from bruno.config import DataConfig, Recipe, load_recipe
from bruno.data import Examples, load_examples
from bruno.data.quality import warn_of_far_numbers, warn_of_misleading_columns
from bruno.flow.preprocessing import ColumnScales
from bruno.recipe_data import RecipeData, fitted_to, is_path, unseen_split, with_absolute_path


def recipe(name: str, **data: object) -> Recipe:
    """The digits recipe on other data."""
    preset = load_recipe("digits")
    return evolve(preset, data=evolve(preset.data, name=name, **data))


@pytest.fixture
def images(tmp_path) -> Path:
    """Ten classes of three images each, of different sizes."""
    for label in range(10):
        folder = tmp_path / "images" / f"class{label}"
        folder.mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((9, 9), 20 * label + i, np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("split", ["train", "validation", "trainval", "test", "all"])
def test_a_split_has_the_examples_of_the_data_set(split):
    expected, found = load_examples("digits", split), RecipeData(load_recipe("digits")).split(split)
    assert found.names == expected.names
    assert torch.equal(found.elements, expected.elements)


def test_the_data_is_read_once_for_all_splits(images, monkeypatch):
    reads = []
    monkeypatch.setattr(
        "bruno.recipe_data.load_examples", lambda *a, **k: reads.append(a) or load_examples(*a, **k)
    )
    data = RecipeData(recipe(str(images), size=8))
    splits = {split: set(data.split(split).names) for split in ("train", "validation", "test", "all")}
    assert data.training().shape == (1, 8, 8)
    assert len(reads) == 1
    assert not splits["train"] & (splits["validation"] | splits["test"])
    assert splits["train"] | splits["validation"] | splits["test"] == splits["all"]


def test_selected_classes_limit_training_but_not_held_out_splits():
    data = RecipeData(recipe("digits", classes=("0", "1")))
    assert data.split("train").names == ("0", "1")
    assert data.split("test").names == ("2", "5", "8")


def test_held_out_classes_are_those_that_training_does_not_use(images):
    assert RecipeData(load_recipe("digits")).held_out().names == ("2", "5", "8")
    own = RecipeData(recipe(str(images), size=8))
    assert {*own.held_out().names, *own.training().names} == set(own.split("all").names)
    assert not set(own.held_out().names) & set(own.training().names)
    assert (
        RecipeData(recipe(str(images), size=8, split="trainval")).held_out().names == own.split("test").names
    )
    for name in own.split("all").names[2:]:
        shutil.rmtree(images / name)
    assert RecipeData(recipe(str(images), size=8)).held_out() is None  # every split has both classes


def test_training_may_use_images_in_their_original_size(images):
    data = RecipeData(recipe(str(images), size=4, original=True))
    assert data.training().shape == (1, 9, 9)
    assert data.split("validation").shape == (1, 4, 4)


def test_images_are_inverted_in_every_split(images):
    plain, inverted = (RecipeData(recipe(str(images), invert=invert)) for invert in (False, True))
    for split in ("train", "test"):
        assert torch.equal(plain.split(split).elements, 255 - inverted.split(split).elements)


def test_small_classes_are_skipped_after_the_split(images):
    for path in list((images / "class0").iterdir())[1:]:
        path.unlink()
    every = RecipeData(recipe(str(images))).split("test").names
    lenient = recipe(str(images), skip_bad=True)
    data = RecipeData(evolve(lenient, train=evolve(lenient.train, set_size=3)))
    with pytest.warns(UserWarning, match=r"skipped 1 class .*class0 \(only 1\)"):
        assert data.split("test").names == every  # the others keep their split
    assert "class0" not in data.split("train").names


@pytest.mark.parametrize("name", ["digits", "images"])
def test_an_unknown_split_is_an_error(name, images):
    with pytest.raises(ValueError, match=r"`split` .*got 'training'"):
        RecipeData(recipe("digits" if name == "digits" else str(images))).split("training")


def test_errors_name_the_settings_of_a_recipe(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("machine,a\nm1,1.5\nm1,2.5\n")
    mixed = tmp_path / "mixed"
    for size in (5, 6, 6):
        (mixed / str(size)).mkdir(parents=True, exist_ok=True)
        Image.new("L", (size, size)).save(mixed / str(size) / "a.png")
    for wrong, message in (
        (recipe("nowhere"), r"^`data` .*; got 'nowhere'\.$"),
        (recipe("digits", format="semicolon"), r"^`data.format` .*digits, .*'semicolon'"),
        (recipe(str(table), group="m"), r"t.csv: `data.group` .*machine, a; got 'm'\.$"),
        (recipe(str(mixed)), r"one size.*\(`data.size`, without `data.original`\)"),
        (recipe(str(table), format="pipes"), r"t.csv: `data.format` .*got 'pipes'"),
    ):
        with pytest.raises(ValueError, match=message):
            RecipeData(wrong).split("all")


def test_the_unseen_split_is_one_that_no_training_used():
    train, trainval = load_recipe("digits"), recipe("digits", split="trainval")
    assert unseen_split(train) == "validation"
    assert unseen_split(train, trainval) == unseen_split(trainval) == "test"


def test_user_data_is_recorded_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_absolute_path(recipe("table.csv")).data.name == str(tmp_path / "table.csv")
    assert with_absolute_path(recipe("digits")).data.name == "digits"
    assert is_path("table.csv")
    assert not is_path("digits")
    assert not is_path(None)


def examples(*counts: int) -> Examples:
    """Rows of classes with these numbers of elements."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    names = tuple(f"c{i}" for i in range(len(counts)))
    return Examples(torch.zeros(len(labels), 2), labels, names, levels=0)


def test_a_recipe_is_limited_by_the_number_of_classes_and_elements(caplog):
    with caplog.at_level(logging.INFO, "bruno"):
        fitted = fitted_to(load_recipe("digits"), examples(5, 9, 7)).train
    assert (fitted.way, fitted.set_size) == (3, 5)
    assert "set size 5 instead of 20: class 'c0' has 5" in caplog.text


def test_episodes_are_fitted_to_the_smallest_class():
    fitted = fitted_to(load_recipe("omniglot"), examples(5, 9, 7)).train
    assert (fitted.way, fitted.shot, fitted.queries) == (3, 1, 4)


def test_only_images_larger_than_those_of_the_model_are_restyled():
    preset = load_recipe("omniglot")
    resized = evolve(preset, data=evolve(preset.data, original=False))
    assert fitted_to(preset, examples(20, 20)).train.restyle == preset.train.restyle > 0
    assert fitted_to(resized, examples(20, 20)).train.restyle == 0
    assert fitted_to(resized, examples(20, 20), {"train.restyle"}).train.restyle > 0


def test_explicit_settings_are_not_changed():
    preset = load_recipe("digits")
    fitted = fitted_to(preset, examples(5, 9), {"train.way", "train.set_size"})
    assert fitted == preset


def test_a_class_of_one_element_is_an_error():
    with pytest.raises(ValueError, match=r"`data` .*at least 2 elements.*'c1' has 1.*skip_bad"):
        fitted_to(load_recipe("digits"), examples(5, 1))


def warned_of_far_numbers(rows):
    """`warn_of_far_numbers` for columns x and y on the scales that suit them."""
    labels = torch.zeros(len(rows), dtype=torch.long)
    kinds = ColumnScales((2,)).fit(rows).kinds
    warn_of_far_numbers(Examples(rows, labels, ("a",), levels=0, columns=("x", "y")), kinds)


def test_columns_with_extreme_values_are_reported():
    rows = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)).double()
    warned_of_far_numbers(rows)  # no warning
    rows[:, 1] = 70 + 5 * rows[:, 1]
    rows[7, 1] = -999.0
    with pytest.warns(UserWarning, match=r"column 'y' .*-999"):
        warned_of_far_numbers(rows)


def test_large_values_of_a_column_on_a_log_scale_are_no_extreme_values():
    rows = (1.5 * torch.randn(400, 2, generator=torch.Generator().manual_seed(1)).double()).exp()
    rows[3, 0] = 5000.0  # 5.7 deviations from the mean of the logarithm
    assert ColumnScales((2,)).fit(rows).kinds == ("log", "log")
    warned_of_far_numbers(rows)  # no warning
    rows[5, 1] = 1e60
    with pytest.warns(UserWarning, match=r"column 'y' .*1e\+60"):
        warned_of_far_numbers(rows)


def test_small_classes_are_skipped_even_if_none_is_large_enough(tmp_path):
    lines = [f"{group},{i}\n" for group in "abcdef" for i in range(6)]
    (tmp_path / "t.csv").write_text("of,x\n" + "".join(lines) + "lonely,1\n")
    skipping = evolve(
        load_recipe("table"), data=DataConfig(str(tmp_path / "t.csv"), group="of", skip_bad=True)
    )
    with pytest.warns(UserWarning, match=r"t.csv: skipped 1 class .*lonely"):
        kept = RecipeData(skipping).split("all")
    assert kept.names == tuple("abcdef")
    assert fitted_to(skipping, kept).train.set_size == 6


@pytest.mark.parametrize("restarts", [False, True])
def test_columns_that_count_rows_are_a_warning(restarts):
    rows = torch.randn(24, 2, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(24) % 3
    rows[:, 0] = torch.arange(24) // 3 if restarts else 100_000 + torch.arange(24)
    rows[4, 0] = torch.nan
    columns = ("row", "heat")
    with pytest.warns(UserWarning, match=r"column 'row' increases .*--set 'data.columns=\[\"heat\"\]'"):
        warn_of_misleading_columns(Examples(rows, labels, ("a", "b", "c"), levels=0, columns=columns))


def test_columns_that_increase_by_chance_or_in_some_sets_are_no_warning():
    labels = torch.arange(24) // 12
    rows = torch.stack([torch.arange(24) % 12, -torch.arange(24), labels], 1).double()
    rows[12:, 0] = 5.0
    warn_of_misleading_columns(Examples(rows, labels, ("a", "b"), levels=0))
    warn_of_misleading_columns(
        Examples(torch.arange(12.0).double()[:, None], labels[:12] * 0, ("a",), levels=0)
    )
