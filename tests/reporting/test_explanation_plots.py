import numpy as np
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig
from bruno.reporting.explanation_plots import contribution_bars, contribution_maps
from bruno.reporting.summaries import summarise
from bruno.tasks import explain


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


def test_a_summary_names_the_lowest_contributions():
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    found = explain(
        model.condition(torch.randn(20, 2)), torch.tensor([[0.0, 9.0]]), features=("heat", "load")
    )
    result = summarise(found)
    assert result.rows[0][2].startswith("load" if found.contributions[0].argmin() else "heat")
    assert len(result.values["contributions"][0]) == 2
    assert result.picture
