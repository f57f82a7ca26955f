import pytest
import torch

from bruno.data.tables import read_csv


def write(path, text: str, **options):
    path = path / "t.csv"
    path.write_text(text, newline="", **options)
    return path


def test_rows_are_grouped_by_a_column(tmp_path):
    examples = read_csv(write(tmp_path, "machine,a,b\nm1,1,2.5\nm2,3,4\nm1,5,6\n"), "machine")
    assert examples.names == ("m1", "m2")
    assert examples.labels.tolist() == [0, 1, 0]
    assert examples.elements.tolist() == [[1, 2.5], [3, 4], [5, 6]]
    assert examples.elements.dtype == torch.float64
    assert examples.columns == ("a", "b")


def test_columns_are_selected_in_the_given_order(tmp_path):
    path = write(tmp_path, "machine,time,a,b\nm1,noon,1,2\nm2,night,3,4\n")
    examples = read_csv(path, "machine", columns=("b", "a"))
    assert examples.elements.tolist() == [[2, 1], [4, 3]]
    assert examples.columns == ("b", "a")
    assert read_csv(path, "machine", columns=("a",)).shape == (1,)


@pytest.mark.parametrize(
    ("text", "group", "columns", "message"),
    [
        ("machine,a\nm1,1\n", "plant", (), r"`group` .*one of machine, a; got 'plant'"),
        ("machine\nm1\n", "machine", (), r"beside 'machine'; got none"),
        ("machine,a\nm1,1\n", "machine", ("c",), r"'c' is missing from machine, a"),
        ("machine,a,a\nm1,1,2\n", "machine", (), r"got 'a' more than once"),
        ("machine,a\n", "machine", (), r"at least one row"),
        ("machine,a\nm1,1\nm1,oops\n", "machine", (), r"line 3 .*'a' .*got 'oops'.*`data.columns`"),
        ("machine,a\nm1,1\x00\n" + "9" * 200_000, "machine", (), r"line \d cannot be"),
    ],
)
def test_a_bad_table_is_named_with_its_problem(tmp_path, text, group, columns, message):
    with pytest.raises(ValueError, match=rf"t.csv: .*{message}"):
        read_csv(write(tmp_path, text), group, columns=columns)


@pytest.mark.parametrize("line", ["m1,1,2,3", "m1,1", "m1,1,1e39", "m1,nan,1", "m1,1,"])
def test_a_bad_line_raises_or_is_skipped(tmp_path, line):
    path = write(tmp_path, f"machine,a,b\nm1,1,2\n\n{line}\n")
    with pytest.raises(ValueError, match=r"t.csv: line 4 cannot be used"):
        read_csv(path, "machine")
    examples = read_csv(path, "machine", skip_bad=True)
    assert examples.skipped == ("line 4",)
    assert examples.elements.tolist() == [[1, 2]]


def test_a_byte_order_mark_is_ignored_and_other_encodings_are_refused(tmp_path):
    path = write(tmp_path, "machine,a\r\nm1,1\r\n", encoding="utf-8-sig")
    assert read_csv(path, "machine").names == ("m1",)
    path = write(tmp_path, "Gerät,a\nm1,1\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"t.csv: .*UTF-8"):
        read_csv(path, "Gerät")
