from dataclasses import replace

import pytest
import torch

from bruno.kinds import Images, Rows
from bruno.reporting.summaries import summarise
from bruno.reporting.summaries.detection import _misfit, _on_drift
from bruno.tasks.anomaly import Judgement
from bruno.tasks.attribution import UnusualColumn
from bruno.tasks.stream_summary import StreamSummary
from bruno.trained.batch import BatchJudgement
from bruno.trained.outliers import Outliers


@pytest.mark.parametrize(
    ("elements", "outliers", "advised"),
    [(12, 2, False), (1200, 120, False), (1000, 185, True), (30, 29, True)],
)
def test_only_many_outliers_show_that_a_model_does_not_fit(elements, outliers, advised):
    summary = StreamSummary()
    for i in range(elements):
        summary.add(str(i), torch.zeros(1), Judgement(0.0, 1, 0.0, i < outliers, False))
    assert bool(_misfit(summary, 0.01, "bruno calibrate MODEL DATA", True)) == advised
    assert _misfit(summary, None, "bruno calibrate MODEL DATA", True) == ""


@pytest.mark.parametrize(("ood", "said"), [(290, True), (20, False)])
def test_a_summary_says_if_most_elements_are_out_of_distribution(ood, said):
    summary = StreamSummary()
    for i in range(300):
        summary.add(str(i), torch.zeros(1), Judgement(0.0, 1, 0.0, i < 290, i < ood))
    note = _misfit(summary, 0.01, "bruno calibrate MODEL CLEAN.csv", True)
    assert ("most are out-of-distribution" in note) == said
    assert "Check units and columns" in note
    assert note.endswith("bruno calibrate MODEL CLEAN.csv")
    assert "Check units" not in _misfit(summary, 0.01, "bruno calibrate MODEL CLEAN", False)


def test_a_set_that_has_changed_keeps_its_name():
    assert _on_drift({"": 12, "pump 7": 30}) == [
        "The distribution of the stream changed near element 12.",
        "The distribution of set 'pump 7' changed near element 30.",
    ]


def summary_of(shape: tuple[int, ...], outliers: int, groups: int = 1) -> StreamSummary:
    """Ten elements of each set; the first elements are outliers, each more unusual than the one before."""
    summary = StreamSummary(latest=None)
    for i in range(10 * groups):
        odd = i < outliers
        judgement = Judgement(
            -1.0 - i if odd else 5.0, 9, 0.0, odd, False, 0.005 if odd else 0.5, "estimated"
        )
        group = f"m{i // 10}" if groups > 1 else ""
        summary.add(f"table.csv, line {i}", torch.zeros(shape, dtype=torch.uint8), judgement, group)
    return summary


def test_outliers_are_listed_with_p_value_set_and_column():
    summary = summary_of((2,), outliers=2, groups=2)
    columns = (None, UnusualColumn(1, -92.125, 60.25, 40.0))
    kind = Rows((2,), ("heat", "flow-2"))
    result = summarise(Outliers("anomaly", summary.most_unusual, columns, summary, kind))
    assert result.name == "anomaly-outliers"
    assert result.columns == ("score", "p", "outlier", "set", "most unusual column")
    assert result.rows == (
        ("−2.0", "≈ 0.005", "table.csv, line 1", "m0", ""),
        ("−1.0", "≈ 0.005", "table.csv, line 0", "m0", "flow-2 −92.12 (expected 60.25)"),
    )
    assert result.values["names"] == ["table.csv, line 1", "table.csv, line 0"]
    assert "Most unusual column: if its value is replaced by the expected one" in result.note


def test_without_outliers_the_most_unusual_element_is_named():
    summary = summary_of((2,), outliers=0)
    result = summarise(Outliers.of("anomaly-batch", summary, Rows((2,))))
    assert not result.picture
    assert not result.rows
    assert "table.csv, line 0: score +5.00, p ≈ 0.5" in result.note


def test_images_of_outliers_are_shown_in_order(figures):
    summary = summary_of((1, 4, 4), outliers=40, groups=5)
    outcome = BatchJudgement(summary, Images((1, 4, 4)), 0.01, "bruno calibrate MODEL DATA")
    result = summarise(outcome.outliers)
    assert len(figures[-1].axes[0].images) == len(result.rows) == 24
    assert "24 most unusual of 40" in result.note
    timeline = summarise(outcome)
    assert len(figures[-1].axes) == 5  # a plot for each set
    assert timeline.values["sets"][:11] == ["m0"] * 10 + ["m1"]


def test_a_batch_of_consecutive_rows_is_drawn_in_the_order_of_time(figures):
    summary = StreamSummary(latest=None)
    for i in range(300):
        summary.add(str(i), torch.zeros(1), Judgement(0.0, 1, 0.0, i == 299, False), f"rows {i // 20}")
    outcome = BatchJudgement(summary, Rows((1,)), 0.01, "bruno calibrate", has_consecutive_sets=True)
    assert "the 15 sets, in order of time" in summarise(outcome).note
    assert figures[-1].axes[0].get_yticklabels()[-1].get_text() == "rows 14"
    assert "most outliers first" in summarise(replace(outcome, has_consecutive_sets=False)).note
    assert figures[-1].axes[0].get_yticklabels()[0].get_text() == "rows 14"


def test_a_batch_judged_by_patches_says_so_and_has_no_nats():
    summary = summary_of((1, 4, 4), outliers=2)
    by_patches = BatchJudgement(summary, Images((1, 4, 4)), 0.01, "bruno calibrate", "patches")
    found, plain = summarise(by_patches), summarise(replace(by_patches, criterion="score"))
    assert "patches of pixels" in found.note
    assert "nats" not in found.note
    assert "in nats" in plain.note
    assert found.picture != plain.picture
