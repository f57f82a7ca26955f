import pytest
import torch

from bruno.reporting.summaries.detection import _misfit
from bruno.tasks.anomaly import Judgement, StreamSummary


@pytest.mark.parametrize(
    ("elements", "outliers", "advised"),
    [(12, 2, False), (1200, 120, False), (1000, 185, True), (30, 29, True)],
)
def test_only_many_outliers_show_that_a_model_does_not_fit(elements, outliers, advised):
    summary = StreamSummary()
    for i in range(elements):
        summary.add(str(i), torch.zeros(1), Judgement(0.0, 1, 0.0, i < outliers, False))
    assert bool(_misfit(summary, 0.01, "bruno calibrate MODEL DATA")) == advised
    assert _misfit(summary, None, "bruno calibrate MODEL DATA") == ""
