import numpy as np
import pytest
import torch
from PIL import Image

from bruno.data import ElementReader


def write(path, value: int, size: int = 10, mode: str = "L") -> None:
    Image.fromarray(np.full((size, size), value, np.uint8)).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    for name, value in (("b.png", 200), ("a.jpg", 100), ("c.png", 0)):
        write(tmp_path / name, value, mode="RGB")
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


def test_the_images_of_a_folder_are_sorted_by_name_and_fit_the_model(folder):
    x, names = ElementReader((1, 4, 6), 256).read_all([folder])
    assert [name.rsplit("/")[-1] for name in names] == ["a.jpg", "b.png", "c.png"]
    assert x.shape == (3, 1, 4, 6)
    assert x.dtype == torch.uint8
    assert x.flatten(1).float().mean(1).tolist() == [100, 200, 0]


def test_images_are_converted_inverted_and_rescaled(folder):
    assert ElementReader((3, 4, 4), 256).read_all([folder / "b.png"])[0].shape == (1, 3, 4, 4)
    inverted, _ = ElementReader((1, 4, 4), 256, invert=True).read_all([folder / "b.png"])
    assert set(inverted.flatten().tolist()) == {55}
    few, _ = ElementReader((1, 4, 4), 17).read_all([folder / "b.png"])
    assert set(few.flatten().tolist()) == {round(200 * 16 / 255)}


def test_elements_are_read_one_at_a_time(folder):
    lines = iter([f"{folder / 'a.jpg'}\n", "\n", f"{folder / 'nowhere.png'}\n"])
    stream = ElementReader((1, 4, 4), 256).read_lines(lines)
    assert next(stream).name.endswith("a.jpg")
    with pytest.raises(FileNotFoundError, match=r"nowhere.png: no such file"):
        next(stream)


def test_rows_are_read_from_a_file_a_folder_or_lines(tmp_path):
    (tmp_path / "rows.csv").write_text("width,height\n1,2\n\n3,4.5\n")
    x, names = ElementReader((2,), 0).read_all([tmp_path / "rows.csv"])
    assert x.tolist() == [[1, 2], [3, 4.5]]
    assert [name.split(", ")[1] for name in names] == ["line 2", "line 4"]
    (tmp_path / "notes.txt").write_text("not a table")
    assert ElementReader((2,), 0).read_all([tmp_path])[1] == names
    first = next(ElementReader((2,), 0).read_lines(["5,6"]))
    assert first.x.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "notes.txt", r"notes.txt: cannot be used: it is not an image"),
        (lambda folder: folder / "empty", r"empty: must be a folder of images"),
    ],
)
def test_a_bad_path_is_named(folder, make, message):
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        ElementReader((1, 4, 4), 256).read_all([make(folder)])


def test_a_bad_row_raises_or_is_skipped():
    lines = ["1,2", "1,2,3", "1,nan", "3,4", "1,1e39"]
    with pytest.raises(ValueError, match=r"line 2: cannot be used: .*2 cells; got 3: 1,2,3"):
        list(ElementReader((2,), 0).read_lines(lines))
    reader = ElementReader((2,), 0, skip_bad=True)
    assert [element.x.tolist() for element in reader.read_lines(lines)] == [[1, 2], [3, 4]]
    assert reader.skipped == ["line 2", "line 3", "line 5"]


def test_dangling_links_and_folders_named_like_images_raise_or_are_skipped(folder):
    (folder / "d.png").symlink_to(folder / "nowhere.png")
    with pytest.raises(ValueError, match=r"d.png: cannot be used"):
        ElementReader((1, 4, 4), 256).read_all([folder])
    (folder / "e.png").mkdir()
    reader = ElementReader((1, 4, 4), 256, skip_bad=True)
    assert len(reader.read_all([folder])[0]) == 3
    assert len(list(reader.read_lines([str(folder / "nowhere.png")]))) == 0
    assert [name.rsplit("/")[-1] for name in reader.skipped] == ["d.png", "e.png", "nowhere.png"]


def test_hidden_files_are_ignored(folder, tmp_path):
    (folder / "._a.jpg").write_bytes(b"macOS")
    assert len(ElementReader((1, 4, 4), 256).read_all([folder])[0]) == 3
    (tmp_path / "t.csv").write_text("1,2\n")
    (tmp_path / "._t.csv").write_bytes(b"1,2,3\n")
    assert len(ElementReader((2,), 0).read_all([tmp_path])[0]) == 1


def test_the_group_column_of_a_header_is_not_a_number():
    reader = ElementReader((2,), 0, group="machine")
    table = ["heat,machine,speed", "1,m1,2", '3,"m2, old",4']
    elements = list(reader.read_lines(table))
    assert [element.x.tolist() for element in elements] == [[1, 2], [3, 4]]
    assert [element.group for element in elements] == ["m1", "m2, old"]
    assert [element.x.tolist() for element in reader.read_lines(["heat,speed", "1,2"])] == [[1, 2]]
    with pytest.raises(ValueError, match="line 2: cannot be used"):
        list(ElementReader((2,), 0).read_lines(table))


def test_columns_of_a_header_are_found_by_name():
    reader = ElementReader((2,), 0, group="machine", columns=("2019", "2020"))
    table = ["machine,2020,2019\n", '"m1,\n', 'new",1,2\n']  # years as names, and a cell of two lines
    assert [element.x.tolist() for element in reader.read_lines(table)] == [[2, 1]]
    for line in ("7,8", "m,20,10,99"):
        with pytest.raises(ValueError, match=r"line 2: cannot be used: .*3 cells; got \d"):
            list(reader.read_lines([table[0], line]))
    with pytest.raises(ValueError, match=r"line 2: cannot be used: '2020' .*got 'x'"):
        list(reader.read_lines([table[0], "m,x,1"]))
    with pytest.raises(ValueError, match=r"the header: .*got '2020' more than once"):
        list(reader.read_lines(["2020,2020,2019", "1,2,3"]))


def test_a_byte_order_mark_in_lines_is_ignored():
    reader = ElementReader((1,), 0, columns=("a",))
    assert [element.x.tolist() for element in reader.read_lines(["\ufeffa\n", "1\n"])] == [[1]]


def test_images_in_unsupported_formats_are_a_warning(folder):
    (folder / "IMG_1.HEIC").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"skipped .*1, first IMG_1.HEIC"):
        assert len(ElementReader((1, 4, 4), 256).read_all([folder])[0]) == 3


def test_other_files_beside_a_table_are_ignored(tmp_path):
    (tmp_path / "t.csv").write_text("1,2\n")
    (tmp_path / "manual.pdf").write_bytes(b"")
    assert len(ElementReader((2,), 0).read_all([tmp_path])[0]) == 1


def test_images_may_have_more_than_256_levels(folder):
    x, _ = ElementReader((1, 4, 4), 1024).read_all([folder / "b.png"])
    assert set(x.flatten().tolist()) == {round(200 * 1023 / 255)}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_the_encoding_of_files_is_detected(tmp_path, encoding):
    (tmp_path / "a.csv").write_text("Gerät,a\n1,2\n", encoding=encoding)
    reader = ElementReader((2,), 0, columns=("a", "Gerät"))
    assert reader.read_all([tmp_path / "a.csv"])[0].tolist() == [[2, 1]]


def test_damaged_utf_8_raises_or_is_skipped(tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n")
    (tmp_path / "b.csv").write_bytes("Gerät,a\n".encode() + b"1,2\nm\xe4,2\n")
    with pytest.raises(ValueError, match=r"b.csv: must be text in UTF-8"):
        ElementReader((2,), 0).read_all([tmp_path])
    reader = ElementReader((2,), 0, skip_bad=True)
    assert len(reader.read_all([tmp_path])[0]) == 1
    assert reader.skipped == [str(tmp_path / "b.csv")]


@pytest.mark.parametrize(
    ("shape", "levels", "message"),
    [
        ((1, 4, 4), 1, r"`levels` .*got 1"),
        ((1, 4, 4), -2, r"`levels` .*got -2"),
        ((4, 4), 256, r"`shape` .*got \(4, 4\)"),
        ((1, 4, 0), 256, r"`shape` .*got \(1, 4, 0\)"),
        ((), 0, r"`shape` .*got \(\)"),
        ((1, 4, 4), 0, r"`shape` .*got \(1, 4, 4\)"),
    ],
)
def test_a_shape_and_levels_that_no_element_has_are_rejected(shape, levels, message):
    with pytest.raises(ValueError, match=message):
        ElementReader(shape, levels)
