import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from bruno.provenance import provenance
from bruno.reporting.plots import (
    Measured,
    bars,
    curves,
    dots,
    learning_curve,
    likely_classes,
    picture,
    prefix_sheet,
    to_uint8,
)
from bruno.reporting.results import Result, page, read_results


def opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


def result(name: str = "one", **changes) -> Result:
    values = {
        "title": "A <title>",
        "values": {"accuracy": 0.5},
        "columns": ("a", "b"),
        "rows": (("1", "2 & 3"),),
    }
    return Result(name, **{**values, **changes})


def test_what_is_written_is_read_again(tmp_path):
    first = result("zebra", picture=picture(np.zeros((2, 2, 1), np.uint8)), note="seen")
    for each in (first, result("ant")):
        path = each.write(tmp_path, config={"rate": 0.1}, seed=7)
    zebra, ant = read_results(tmp_path)  # in the order in which they were made
    assert (zebra.name, zebra.picture, zebra.rows, zebra.note) == ("zebra", first.picture, first.rows, "seen")
    assert ant.picture == b""
    record = json.loads(path.read_text())
    assert record["values"] == {"accuracy": 0.5}
    assert record["config"] == {"rate": 0.1}
    assert record["provenance"]["seed"] == 7
    assert {"command", "commit", "hardware", "packages"} <= record["provenance"].keys()


def test_what_is_not_finite_is_null(tmp_path):
    path = result(values={"curve": (1.0, float("nan"), float("inf"))}).write(tmp_path, config={}, seed=0)
    assert json.loads(path.read_text())["values"] == {"curve": [1.0, None, None]}


def test_a_file_that_is_no_result_is_named_and_left_out(tmp_path):
    Result("kept", "Kept", {}).write(tmp_path, config={}, seed=0)
    (tmp_path / "results" / "mine.json").write_text('{"a": 1}')
    (tmp_path / "results" / "cut.json").write_text('{"title": "Cu')
    with pytest.warns(UserWarning, match="(mine|cut).json: is no result, or damaged") as told:
        assert [result.name for result in read_results(tmp_path)] == ["kept"]
    assert len(told) == 2


def test_a_run_without_results_has_none(tmp_path):
    assert read_results(tmp_path) == []


def test_a_page_needs_nothing_else_and_says_what_it_was_given(tmp_path):
    result(picture=picture(np.zeros((2, 2, 1), np.uint8))).write(tmp_path, config={}, seed=0)
    text = page("Title", "Lead & all", read_results(tmp_path))
    assert "A &lt;title&gt;" in text
    assert "2 &amp; 3" in text
    assert "Lead &amp; all" in text
    assert re.findall(r'src="([^"]{10})', text) == ["data:image"]
    assert "http" not in text
    assert "seed 0" in text


def test_a_picture_keeps_every_pixel_as_a_square():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 100, 1), np.uint8)
    image = opened(picture(pixels))
    assert image.size == (1000, 50)
    assert np.array_equal(np.asarray(image)[5::10, 5::10], pixels[..., 0])
    assert opened(picture(np.zeros((4, 2000, 3), np.uint8))).size == (2000, 4)


def test_samples_by_prefix_are_shown_with_the_number_seen():
    images = np.random.default_rng(0).integers(0, 256, (3, 14, 1, 28, 28), np.uint8)
    sets = [(some[:2], some[2:].unflatten(0, (3, 4))) for some in torch.from_numpy(images)]
    image = np.asarray(opened(prefix_sheet(sets[:1], (0, 1, 20))))
    assert image.shape[2] == 3
    # Each sample is there pixel by pixel, in its column, from the bottom right corner on.
    factor = 1000 // (1 + 5 * 29 + 2)
    for column in range(3):
        for row in range(4):
            down = image.shape[0] - 12 - factor * (4 - row) * 29
            right = image.shape[1] - 12 - factor * ((3 - column) * 29)
            cell = image[down : down + 28 * factor : factor, right : right + 28 * factor : factor]
            assert np.array_equal(cell[..., 0], sets[0][1][column, row, 0].numpy())
    # Above the columns there is nothing but their numbers.
    header = image[:21]
    inked = (header < 128).any(0).any(1)
    assert inked[-29 * factor - 13 :].any()
    assert not inked[-12:].any()
    assert not np.array_equal(image, np.asarray(opened(prefix_sheet(sets[:1], (0, 1, 21)))))
    # Narrow sets are side by side, wide ones below each other; no corner is empty.
    three = np.asarray(opened(prefix_sheet(sets, (0, 1, 2))))
    assert three.shape[1] > three.shape[0]
    wide = [(a.repeat(4, 1, 1, 1), b.repeat(3, 1, 1, 1, 1)[:8]) for a, b in sets]
    three = np.asarray(opened(prefix_sheet(wide, range(8))))
    assert three.shape[0] > three.shape[1]


def test_the_commit_is_that_of_this_source_and_of_no_other_tree(tmp_path, monkeypatch):
    monkeypatch.delenv("BRUNO_COMMIT", raising=False)
    (tmp_path / ".venv").mkdir()
    for name in ("theirs.py", ".venv/provenance.py"):
        (tmp_path / name).touch()
    if shutil.which("git"):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init"], ["add", "theirs.py"], [*who, "commit", "-m", "theirs"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr("bruno.provenance.__file__", str(tmp_path / ".venv" / "provenance.py"))
    assert provenance(0)["commit"] is None


def test_grey_values_span_what_can_be_seen():
    images = torch.tensor([0, 8, 16], dtype=torch.uint8).view(3, 1, 1, 1)
    assert to_uint8(images, 17).flatten().tolist() == [0, 128, 255]
    images = torch.arange(256).to(torch.uint8).view(-1, 1, 1, 1)
    assert torch.equal(to_uint8(images, 256), images)


@pytest.mark.parametrize("extra", [{}, {"validation": 2.0}, {"accuracy": 0.5}])
def test_a_learning_curve_shows_what_the_log_has(extra):
    log = [{"index": i, "bits_per_dim": 3.0 / i, "validation": None, "accuracy": None} for i in range(1, 50)]
    plain = learning_curve(log)
    shown = learning_curve([*log[:-1], {**log[-1], **extra}])
    assert opened(shown).size == (910, 468)
    assert (shown == plain) == (not extra)


def test_a_learning_curve_has_room_for_validation_above_training():
    log = [{"index": i, "bits_per_dim": 3.0 / i, "validation": None, "accuracy": None} for i in range(1, 500)]
    first, second = (learning_curve([*log, {"index": 500, "validation": bits}]) for bits in (5.0, 6.0))
    assert first != second


def test_what_towers_above_a_learning_curve_does_not_flatten_it():
    log = [{"index": i, "bits_per_dim": 3.0 / i, "validation": None, "accuracy": None} for i in range(1, 200)]
    high, higher = (learning_curve([{**log[0], "bits_per_dim": bits}, *log[1:]]) for bits in (1e3, 1e6))
    unlike = np.asarray(opened(high)) != np.asarray(opened(higher))
    assert unlike.mean() < 1e-3  # the slope of the line that leads out of the picture


def test_curves_are_cut_off_at_the_top():
    high, higher = (curves({"a": ([1, 2, 3], [y, 2.0, 1.0])}, "x", "y", top=3.0) for y in (1e3, 1e6))
    assert (np.asarray(opened(high)) != np.asarray(opened(higher))).mean() < 1e-2


def test_curves_have_errors_and_logarithmic_axes():
    lines = {"a": ([1, 10, 100], [1.0, 2.0, 3.0]), "b": ([1, 10, 100], [3.0, 2.0, 1.0])}
    plain = curves(lines, "x", "y")
    assert plain != curves(lines, "x", "y", logarithmic="x")
    assert plain != curves(lines, "x", "y", errors={"a": [0.1, 0.1, 0.1]})


def test_bars_and_dots_say_which_numbers_are_missing():
    two = [Measured(1.0, 0.1), Measured(2.0, 0.1)]
    with pytest.raises(ValueError, match=r"`b` must have 2 values, one for each place; got 1"):
        bars(["x", "y"], {"a": two, "b": two[:1]}, "height", chance=[1.0, 1.0])
    with pytest.raises(ValueError, match=r"`chance` must have 2 values, one for each place; got 3"):
        bars(["x", "y"], {"a": two}, "height", chance=[1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"`a` must have 3 values, one for each place; got 2"):
        dots(["x", "y", "z"], {"measure": {"a": two}})
    with pytest.raises(ValueError, match=r"`shares` must have 2 values, one for each place; got 1"):
        likely_classes(["x", "y"], [[("class", 1.0)]])


@pytest.mark.parametrize("panels", [1, 2, 3])
def test_dots_have_room_for_every_method_and_measure(panels):
    def height(methods: int) -> int:
        measured = {"1 %": [Measured(0.5, 0.1)] * methods, "5 %": [Measured(0.6, 0.1)] * methods}
        rows = [f"method {i}" for i in range(methods)]
        return opened(dots(rows, {f"measure {i}": measured for i in range(panels)})).height

    assert height(8) > height(4) + 100


def test_many_groups_of_bars_make_a_wide_picture():
    def width(groups: int) -> int:
        return opened(
            bars(["x"] * groups, {"a": [Measured(1.0, 0.1)] * groups}, "y", chance=[0.5] * groups)
        ).width

    assert width(1) == width(10) < width(40)


def test_long_class_names_keep_what_tells_them_apart():
    def shown(name: str) -> bytes:
        return likely_classes(["image.png"], [[(name, 0.9), ("$price$ of_it", 0.1)]])

    assert shown("character number 1 of an alphabet") != shown("character number 1 of the alphabets")
    assert shown("a" * 30 + "1") != shown("a" * 30 + "2")
    assert opened(shown("a" * 30)).size == opened(shown("a")).size


def test_classes_stand_beside_the_image_in_question():
    shares = [[("cat", 0.7), ("dog", 0.3)]] * 2
    dark, bright = (torch.full((2, 3, 4, 4), level, dtype=torch.uint8) for level in (0, 250))
    assert likely_classes(["a", "b"], shares, dark) != likely_classes(["a", "b"], shares, bright)
    assert likely_classes(["a", "b"], shares, dark) != likely_classes(["a", "b"], shares)


def test_a_long_table_is_folded_away():
    rows = tuple((str(i), "x") for i in range(20))
    assert "<details>" in page("t", "", [result(rows=rows)])
    assert "<details>" not in page("t", "", [result(rows=rows[:5])])
