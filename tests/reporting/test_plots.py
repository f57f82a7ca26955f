import math

import numpy as np
import pytest

from bruno.reporting.figure import text_width
from bruno.reporting.plots import (
    Measured,
    accuracy_bars,
    bar_plot,
    dot_plot,
    learning_curve,
    line_plot,
    predictive_bands,
    ranking_plot,
    scatter_plot,
    training_curves,
)

TWO = [Measured(1.0, 0.1), Measured(2.0, 0.1)]


def log(entries: int) -> list[dict]:
    return [
        {"index": i, "bits_per_dim": 3.0 / i, "validation": None, "accuracy": None} for i in range(1, entries)
    ]


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("extra", [{}, {"validation": 2.0}, {"accuracy": 0.5}])
def test_a_learning_curve_shows_what_was_logged(extra, decode, figures):
    entries = log(50)
    plain = learning_curve(entries)
    shown = learning_curve([*entries[:-1], {**entries[-1], **extra}])
    assert decode(shown).size == (910, 468)
    assert (shown == plain) == (not extra)
    assert len(legend(figures[1])) == 1 + len(extra)


def test_a_learning_curve_has_room_for_validation_above_training():
    entries = log(500)
    first, second = (learning_curve([*entries, {"index": 500, "validation": bits}]) for bits in (5.0, 6.0))
    assert first != second


def test_high_first_steps_do_not_flatten_a_learning_curve(decode):
    entries = log(200)
    high, higher = (
        learning_curve([{**entries[0], "bits_per_dim": bits}, *entries[1:]]) for bits in (1e3, 1e6)
    )
    unlike = np.asarray(decode(high)) != np.asarray(decode(higher))
    assert unlike.mean() < 1e-3  # only the slope of the line that leaves the plot


def test_lines_are_cut_off_at_ymax(decode):
    high, higher = (line_plot({"a": ([1, 2, 3], [y, 2.0, 1.0])}, "x", "y", ymax=3.0) for y in (1e3, 1e6))
    assert (np.asarray(decode(high)) != np.asarray(decode(higher))).mean() < 1e-2


def test_lines_have_errors_and_logarithmic_axes(figures):
    lines = {"a": ([1, 10, 100], [1.0, 2.0, 3.0]), "b": ([1, 10, 100], [3.0, 2.0, 1.0])}
    plain = line_plot(lines, "x", "y")
    assert plain != line_plot(lines, "x", "y", log="x")
    assert plain != line_plot(lines, "x", "y", errors={"a": [0.1, 0.1, 0.1]})
    plain_figure, log_figure, error_figure = figures
    (axes,) = log_figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert [text.get_text() for text in axes.get_xticklabels() if text.get_text() == "100"] == ["100"]
    assert legend(plain_figure) == ["a", "b"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
    assert len(error_figure.axes[0].collections) == 1


def test_whole_numbers_have_whole_ticks(figures):
    line_plot({"a": ([1, 2, 3], [1.0, 2.0, 3.0])}, "x", "y")
    line_plot({"a": ([1], [1.0])}, "x", "y")
    for figure in figures:
        assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


@pytest.mark.parametrize("names", [["a", "b"], ["a long name of a line " * 2] * 4, ["n" * 70, "b"]])
def test_a_legend_fits_the_width_and_covers_no_plot(figures, names):
    line_plot({f"{name}{i}": ([1, 2], [i, i]) for i, name in enumerate(names)}, "x", "y")
    (figure,) = figures
    box, plot = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert box.y0 >= plot.y1


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: bar_plot(["x", "y"], {"a": TWO, "b": TWO[:1]}, "height", chance=[1.0, 1.0]),
            r"`b` must have 2 values.*got 1",
        ),
        (
            lambda: bar_plot(["x", "y"], {"a": TWO}, "height", chance=[1.0, 1.0, 1.0]),
            r"`chance` must have 2 values.*got 3",
        ),
        (lambda: dot_plot(["x", "y", "z"], {"measure": {"a": TWO}}), r"`a` must have 3 values.*got 2"),
    ],
)
def test_missing_values_raise(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_many_groups_of_bars_make_a_wide_plot(decode):
    def width(groups: int) -> int:
        bars = {"a": [Measured(1.0, 0.1)] * groups}
        return decode(bar_plot(["x"] * groups, bars, "y", chance=[0.5] * groups)).width

    assert width(1) == width(10) < width(40)


def test_accuracies_are_drawn_in_per_cent(figures):
    accuracy_bars(
        ["5-way 1-shot", "20-way 1-shot"], {"a": [Measured(0.9, 0.01), Measured(1, 0)]}, [0.2, 0.05]
    )
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["5-way\n1-shot", "20-way\n1-shot"]
    assert [bar.get_height() for bar in axes.patches] == [90, 100]
    assert [text.get_text() for text in axes.texts] == ["90.0", "100.0"]
    assert all(
        text.get_window_extent().y1 < figures[0].legends[0].get_window_extent().y0 for text in axes.texts
    )
    assert legend(figures[0]) == ["a", "chance"]


@pytest.mark.parametrize("panels", [1, 2, 3])
def test_a_dot_plot_has_room_for_every_row_and_panel(panels, decode, figures):
    def height(methods: int) -> int:
        measured = {"1 %": [Measured(0.5, 0.1)] * methods, "5 %": [Measured(0.6, 0.1)] * methods}
        rows = [f"method {i}" for i in range(methods)]
        return decode(dot_plot(rows, {f"measure {i}": measured for i in range(panels)})).height

    assert height(8) > height(4) + 100
    shown = [axes.get_title("left") for axes in figures[0].axes if axes.axison]
    assert shown == [f"measure {i}" for i in range(panels)]


def test_a_scatter_plot_has_a_point_per_pair(figures):
    scatter_plot([0.1, 1.0], np.array([1.0, 10.0]), "correlation", "degrees of freedom", log="xy")
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.lines[0].get_xydata().tolist() == [[0.1, 1.0], [1.0, 10.0]]


def test_predictive_bands_are_two_standard_deviations_wide(figures):
    predictions = {"Gaussian": ([1.0, 1.0], [4.0, 4.0]), "Student-t": ([0.0, 0.0], [1.0, 0.25])}
    predictive_bands((0.5, 2.0), predictions)
    for axes, (name, (mean, variance)) in zip(figures[0].axes, predictions.items(), strict=True):
        assert axes.get_title("left") == name
        observations, centre = axes.lines
        assert observations.get_ydata().tolist() == [0.5, 2.0]
        assert centre.get_ydata().tolist() == mean
        band = axes.collections[0].get_paths()[0].get_extents()
        assert math.isclose(band.y1, mean[0] + 2 * math.sqrt(variance[0]))


@pytest.mark.parametrize("variants", [1, 3, 4])
def test_training_curves_have_a_panel_per_variant_and_a_colour_per_process(variants, figures):
    names = [f"variant {i}" for i in range(variants)]
    values = [3.0, 2.0, math.nan, 1.0]
    training_curves([(name, process, values) for name in names for process in ("Student-t", "Gaussian")])
    (figure,) = figures
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title("left") for axes in panels] == names
    for axes in panels:
        colours = {line.get_label(): line.get_color() for line in axes.lines if line.get_label()[0] != "_"}
        assert list(colours) == ["Student-t", "Gaussian"]
        assert len(set(colours.values())) == 2
    for axes in panels[-2:]:  # the lowest of each column
        assert any(text.get_visible() and text.get_text() for text in axes.get_xticklabels())
    assert legend(figure) == ["Student-t", "Gaussian"]


@pytest.mark.parametrize("scores", [[3.5, 0.2, -4.0], [-1.0, -2.0], [5.0]])
def test_a_ranking_has_a_bar_for_each_element_best_first(scores, figures):
    names = ["$x_1$ first", "b" * 100, "last"][: len(scores)]
    ranking_plot(names, scores)
    (axes,) = figures[-1].axes
    assert [bar.get_width() for bar in axes.patches] == scores
    heights = [axes.transData.transform((0, bar.get_y()))[1] for bar in axes.patches]
    assert heights == sorted(heights, reverse=True)
    assert [text.get_text() for text in axes.texts] == [f"{score:+.1f}".replace("-", "−") for score in scores]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "1.  $x_1$ first"
    assert all(len(label) < 50 for label in labels)


@pytest.mark.parametrize("text", ["漢字", "กข"])
def test_a_character_that_the_font_lacks_is_as_wide_as_a_box(text):
    assert text_width(text, 10) == pytest.approx(2 * 1.15 * 10 / 72)
    assert text_width(f"{text} ab", 10) == pytest.approx(text_width(text, 10) + text_width(" ab", 10))
