import numpy as np
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig
from bruno.kinds import Images
from bruno.reporting.explanation_plots import (
    _without_common_folder,
    contribution_bars,
    contribution_maps,
    patch_score_maps,
)
from bruno.reporting.summaries import summarise
from bruno.tasks import PatchExplanation, explain


def test_bars_are_sorted_by_size_and_coloured_by_sign(figures):
    contributions = np.array([[1.0, -5.0, 0.5], [2.0, 0.0, -1.0]])
    contribution_bars(["first", "second"], ["heat", "load", "noise"], contributions, np.full((2, 3), 0.1))
    first, second = figures[-1].axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["load", "heat", "noise"]
    assert [bar.get_width() for bar in second.patches] == [2.0, -1.0, 0.0]
    assert {axes.get_xlabel() for axes in (first, second)} == {"contribution to the score (nats)"}
    assert first.patches[0].get_facecolor() != first.patches[1].get_facecolor()


def test_maps_of_all_images_have_one_scale(figures):
    images = torch.zeros((5, 1, 8, 8), dtype=torch.uint8)
    contribution_maps([str(i) for i in range(5)], images, np.random.default_rng(0).normal(size=(5, 2, 2)))
    limits = {image.get_clim() for axes in figures[-1].axes for image in axes.images}
    assert len(limits) == 2  # of the images and of the maps


def test_maps_have_the_numbers_of_rows_and_columns(figures):
    images, random = torch.zeros((2, 1, 32, 32), dtype=torch.uint8), np.random.default_rng(0)
    contribution_maps(["a", "b"], images, random.normal(size=(2, 2, 7)))
    patch_score_maps(["a", "b"], images, -random.random((2, 13, 13)))
    odd = ["1", "3", "5", "7", "9", "11", "13"]
    numbers = [(["1", "2"], ["1", "2", "3", "4", "5", "6", "7"]), (odd, odd)]
    for figure, (rows, columns) in zip(figures[-2:], numbers, strict=True):
        for axes in figure.axes[2:4]:
            assert [label.get_text() for label in axes.get_yticklabels()] == rows
            assert [label.get_text() for label in axes.get_xticklabels()] == columns


def test_patches_that_judged_images_are_explained_in_their_unit(figures):
    maps = -torch.rand((3, 13, 13))
    maps[0, 4, 10] = -7.0
    outcome = PatchExplanation(
        maps, torch.zeros((3, 1, 32, 32)).byte(), Images((1, 32, 32)), ("a", "b", "c"), 5
    )
    result = summarise(outcome)
    assert result.rows[0][1].endswith("7.00")
    assert result.rows[0][2].startswith("row 5, column 11 ")
    assert result.rows[0][2].count("; ") == 2
    assert "13 × 13 patches of 8 × 8 pixels, 2 × 2 pixels apart" in result.note
    assert result.note.startswith("The 3 most unusual of 5 outliers. ")
    assert "nats" not in result.note
    assert outcome.by_feature[0]["row 5, column 11"] == -7
    assert figures[-1].axes[-1].get_ylabel() == "score of a patch (typical: −1)"


def test_a_summary_names_the_lowest_contributions():
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    found = explain(
        model.condition(torch.randn(20, 2)), torch.tensor([[0.0, 9.0]]), features=("heat", "load")
    )
    result = summarise(found)
    assert result.rows[0][2].startswith("load" if found.contributions[0].argmin() else "heat")
    assert result.rows[0][2].count("; ") == 1
    assert len(result.values["contributions"][0]) == 2
    assert result.picture


def test_names_in_titles_do_not_begin_with_the_folders_of_all():
    assert _without_common_folder(["new/a/1.png", "new/b/1.png"]) == ["a/1.png", "b/1.png"]
    assert _without_common_folder(["new/a/1.png", "new/a/2.png"]) == ["1.png", "2.png"]
    assert _without_common_folder(["1.png", "new/2.png"]) == ["1.png", "new/2.png"]
    assert _without_common_folder(["a/1.png"]) == ["1.png"]
