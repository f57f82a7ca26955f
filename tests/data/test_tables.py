import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bruno.data import Examples, tables
from bruno.data.tables import read_table


def write(path, text: str, **options):
    path = path / "t.csv"
    path.write_text(text, newline="", **options)
    return path


def test_rows_are_grouped_by_a_column(tmp_path):
    examples = read_table(write(tmp_path, "machine,a,b\nm1,1,2.5\nm2,3,4\nm1,5,6\n"), "machine")
    assert examples.names == ("m1", "m2")
    assert examples.labels.tolist() == [0, 1, 0]
    assert examples.elements.tolist() == [[1, 2.5], [3, 4], [5, 6]]
    assert examples.elements.dtype == torch.float64
    assert examples.columns == ("a", "b")


def test_columns_are_selected_in_the_given_order(tmp_path):
    path = write(tmp_path, "machine,time,a,b\nm1,noon,1,2\nm2,night,3,4\n")
    examples = read_table(path, "machine", columns=("b", "a"))
    assert examples.elements.tolist() == [[2, 1], [4, 3]]
    assert examples.columns == ("b", "a")
    assert read_table(path, "machine", columns=("a",)).shape == (1,)


@pytest.mark.parametrize(
    ("text", "group", "columns", "message"),
    [
        ("machine,a\nm1,1\n", "plant", (), r"`group` .*one of machine, a; got 'plant'"),
        ("machine\nm1\n", "machine", (), r"besides 'machine'; got none"),
        ("machine,a\nm1,1\n", "machine", ("c",), r"'c' is missing from machine, a"),
        ("machine,a,a\nm1,1,2\n", "machine", (), r"got 'a' more than once"),
        ("machine,a\n", "machine", (), r"at least one row"),
        ("machine,a\nm1,1\nm1,oops\n", "machine", (), r"line 3 .*'a' .*got 'oops'.*`skip_bad`.*`columns`"),
        ("machine,a\nm1,1\nm1,1\x00\n", "machine", (), r"line 3 cannot be"),
        ("machine,a\nm1,1\n" + "9" * 200_000, "machine", (), r"line 3 cannot be"),
    ],
)
def test_a_bad_table_is_named_with_its_problem(tmp_path, text, group, columns, message):
    with pytest.raises(ValueError, match=rf"t.csv: .*{message}"):
        read_table(write(tmp_path, text), group, columns=columns)


@pytest.mark.parametrize("line", ["m1,1,2,3", "m1,1", "m1,1,1e39", "m1,nan,1", "m1,1,"])
def test_a_bad_line_raises_or_is_skipped(tmp_path, line):
    path = write(tmp_path, f"machine,a,b\nm1,1,2\n\n{line}\n")
    with pytest.raises(ValueError, match=r"t.csv: line 4 cannot be used"):
        read_table(path, "machine")
    examples = read_table(path, "machine", skip_bad=True)
    assert examples.skipped == ("line 4",)
    assert examples.elements.tolist() == [[1, 2]]


@pytest.mark.parametrize(("line", "argument"), [("m1,x,2", "columns"), (",1,2", "group")])
def test_an_error_in_a_line_names_the_argument_that_selects_other_columns(tmp_path, line, argument):
    path = write(tmp_path, f"machine,a,b\nm1,1,2\n{line}\n")
    with pytest.raises(ValueError, match=rf"line 3 cannot be used: .*, or select [\w ]+ \(`{argument}`\)\.$"):
        read_table(path, "machine")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252", "latin-1"])
@pytest.mark.parametrize("least", [0, 2**20])  # parsed by pyarrow, and in Python
def test_encodings_are_detected(tmp_path, monkeypatch, encoding, least):
    monkeypatch.setattr(tables, "_MIN_FAST_BYTES", least)
    path = write(tmp_path, "Gerät,Höhe\r\nÄ1,1.5\r\nÄ1,2\r\n", encoding=encoding)
    examples = read_table(path, "Gerät")
    assert (examples.names, examples.columns) == (("Ä1",), ("Höhe",))
    assert examples.elements.tolist() == [[1.5], [2]]


def test_damaged_utf_8_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("Gerät,a\nm1,1\n".encode() + b"m\xe4,2\n")
    with pytest.raises(ValueError, match=r"t.csv: .*line 3 is not utf-8.*`table_format`"):
        read_table(path, "Gerät")
    with pytest.raises(ValueError, match=r"`group` .*got 'Gerät'"):  # it is read, in another encoding
        read_table(path, "Gerät", table_format="cp1252")


# --- pyarrow ------------------------------------------------------------------------------------------------


def outcome(path, **options) -> Examples | str:
    try:
        return read_table(path, "machine", **options)
    except ValueError as error:
        return str(error)


def assert_both_agree(path, **options) -> None:
    pytest.importorskip("pyarrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_MIN_FAST_BYTES", 0)
        fast = outcome(path, **options)
        patch.setattr(tables, "_parse_fast", lambda *_: None)
        slow = outcome(path, **options)
    if isinstance(fast, str) or isinstance(slow, str):
        assert fast == slow
        return
    assert torch.equal(fast.elements, slow.elements)
    assert torch.equal(fast.elements.signbit(), slow.elements.signbit())
    assert torch.equal(fast.labels, slow.labels)
    for name in ("names", "skipped", "levels", "columns"):
        assert getattr(fast, name) == getattr(slow, name)


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
numbers = finite.map(str) | st.integers(-(10**25), 10**25).map(str) | finite.map("{:.3e}".format)
odd_numbers = st.sampled_from(
    ["", " ", "nan", "inf", "-Infinity", "nan(1)", "NA", "null", "true", "1_0", "+1", " 1", "1\t", "1.", ".5"]
) | st.sampled_from(
    ["1e400", "1e-400", "-0", "1e39", "0x1p3", "1e", "--1", "١", "1\x00", "1\u00a0", "1,5", '"', "1\n"]
)
groups = st.sampled_from(
    ["m1", "m2", "", " m1", "NA", "null", "ä", "m1\x00", "a,b", 'a"b', '"', "a\nb", "\ufeff"]
)
any_text = st.text(max_size=4)


def written(cell: str, quote: bool) -> str:
    """A cell with or without quotes; unquoted commas, quotes and line ends are kept on purpose."""
    return '"' + cell.replace('"', '""') + '"' if quote else cell


@st.composite
def csv_tables(draw, cells, groups=groups, max_extra=0):
    """Two columns of numbers and one that is not read, in any order, with any line ends."""
    order = draw(st.permutations(["machine", "a", "b", "note"]))
    ends = draw(st.sampled_from([["\n"], ["\r\n"], ["\n", "\r\n", "\r", "\n\n"]]))
    quotes = draw(st.sampled_from([[False], [True], [False, True]]))
    lines = [",".join(written(name, draw(st.sampled_from(quotes))) for name in order)]
    for _ in range(draw(st.integers(0, 4))):
        row = {"machine": draw(groups), "note": draw(any_text), "a": draw(cells), "b": draw(cells)}
        line = [written(row[name], draw(st.sampled_from(quotes))) for name in order]
        line += ["1"] * draw(st.integers(0, max_extra))
        lines.append(",".join(line))
    text = "".join(line + draw(st.sampled_from(ends)) for line in lines)
    return draw(st.sampled_from(["", "\ufeff"])) + (text if draw(st.booleans()) else text.rstrip("\r\n"))


every_table = (
    csv_tables(numbers)
    | csv_tables(numbers, groups=st.sampled_from(["m1", "m2", "ä"]))
    | csv_tables(numbers | odd_numbers)
    | csv_tables(numbers | odd_numbers | any_text, groups=groups | any_text, max_extra=1)
)


@pytest.mark.slow
@given(every_table, st.sampled_from([("a", "b"), ("b",), ("a", "machine"), ()]), st.booleans())
def test_pyarrow_and_python_give_the_same_examples_or_the_same_error(
    tmp_path_factory, text, columns, skip_bad
):
    path = tmp_path_factory.getbasetemp() / "both.csv"
    path.write_bytes(text.encode())
    assert_both_agree(path, columns=columns, skip_bad=skip_bad)


def test_pyarrow_parses_ordinary_tables(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables, "_MIN_FAST_BYTES", 0)
    monkeypatch.setattr(tables, "_parse", lambda *_: pytest.fail("parsed in Python"))
    for text in (
        "machine,a,b\nm1,1,2.5\n\nm2,-3,4e-1",
        '\ufeff"machine","a"\r\n"m1, old","1"\r\n"m ""2""",2\r\n',
    ):
        assert len(read_table(write(tmp_path, text), "machine")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["", '"a\nb",1,\n', 'm1,"1', "m1,x,\n", "m1,1\n", "m1,1,\rm2,2,\n", "m1,nan,\n", "m" * 140_000 + ",1,\n"],
    ids=lambda line: repr(line[:10]),
)
def test_pyarrow_and_python_agree_on_tables_of_many_blocks(tmp_path, line):
    values = np.random.default_rng(0).normal(size=300).tolist()
    lines = [f"m{i % 5},{value},{'x' * 8000}\n" for i, value in enumerate(values)]
    path = write(tmp_path, "machine,a,note\n" + "".join([*lines[:150], line, *lines[150:]]))
    assert path.stat().st_size > 2 * 2**20  # pyarrow reads blocks of 1 MiB
    assert_both_agree(path, columns=("a",))


def test_pyarrow_is_optional_and_small_tables_do_not_import_it(tmp_path, monkeypatch):
    path = write(tmp_path, "machine,a\nm1,1\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(tables, "_MIN_FAST_BYTES", 0)
    assert len(read_table(path, "machine")) == 1
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    read_table(path, "machine")
    assert "pyarrow" not in sys.modules


@pytest.mark.parametrize("least", [0, 2**20])  # parsed by pyarrow if it is installed, and in Python
def test_a_row_without_a_group_is_unreadable(tmp_path, monkeypatch, least):
    monkeypatch.setattr(tables, "_MIN_FAST_BYTES", least)
    path, rows = tmp_path / "t.csv", 3
    path.write_text("of,x\n" + "a,1.000000000000\n" * rows + ",2\nb,3\n")
    with pytest.raises(ValueError, match=rf"line {rows + 2} .*'of' .*empty"):
        read_table(path, "of")
    read = read_table(path, "of", skip_bad=True)
    assert read.names == ("a", "b")
    assert read.skipped == (f"line {rows + 2}",)


# --- which columns are read -------------------------------------------------------------------------------


def test_columns_that_are_not_numbers_are_ignored_and_named(tmp_path):
    text = ",time,machine,a,state,b,\n0,2026-01-31 10:00,m1,1,ok,2,\n1,2026-01-31 10:05,m2,3,hot,NA,\n"
    examples = read_table(write(tmp_path, text), "machine", missing=True)
    assert examples.columns == ("a", "b")
    ignored = ("column 1 (row number)", "time (date)", "state (text)", "column 7 (empty)")
    assert examples.ignored == ignored
    assert examples.elements.isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize(
    "cell", ["31.01.2026", "1/31/26 9:15", "12:30", "12:30:01.5", "31 Jan 2026", "Jan 31, 2026"]
)
def test_dates_are_not_numbers_or_text(tmp_path, cell):
    path = write(tmp_path, f"a;when\n1;{cell}\n2;{cell}\n")
    assert read_table(path).ignored == ("when (date)",)


@pytest.mark.parametrize("cell", ["1.0.0", "2.13.0", "1.2.3", "10.0.0.1", "0.1.12"])
def test_versions_are_text_and_not_dates(tmp_path, cell):
    path = write(tmp_path, f"a;version\n1;{cell}\n2;{cell}\n")
    assert read_table(path).ignored == ("version (text)",)


def test_infinite_numbers_are_an_error_without_a_warning(tmp_path):
    for header in ("a,b", ",b"):
        with pytest.raises(ValueError, match="line 2"):
            read_table(write(tmp_path, f"{header}\n0,1\n1e400,2\n1e400,3\n".replace("0,1", "1e400,1")))


def test_a_typing_error_does_not_turn_a_column_into_text(tmp_path):
    path = write(tmp_path, "machine,a\nm1,1\nm1,1o\nm1,3\n")
    with pytest.raises(ValueError, match=r"line 3 .*'a' .*got '1o'"):
        read_table(path, "machine")


@pytest.mark.parametrize("cell", ["1_400", "\uff11\uff12", "\u0661", "1.5.2", "0x10", "inf"])
def test_only_ascii_digits_make_a_number(tmp_path, cell):
    path = write(tmp_path, f"machine,a\nm1,1\nm1,2\nm1,{cell}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 4 cannot be used: 'a'"):
        read_table(path, "machine")


def test_consecutive_rows_form_sets_without_a_group_column(tmp_path):
    path = write(tmp_path, "a,b\n" + "".join(f"{i},{i % 3}\n" for i in range(47)))
    examples = read_table(path)
    assert examples.names == ("rows 1-20", "rows 21-47")
    assert examples.counts.tolist() == [20, 27]
    assert examples.elements[:, 0].tolist() == list(range(47))


def test_a_table_without_a_header_has_numbered_columns(tmp_path):
    examples = read_table(write(tmp_path, "m1,1,2\nm2,3,4\n"), "1")
    assert (examples.columns, examples.names) == (("2", "3"), ("m1", "m2"))
    assert "no-header" in examples.table_format
    assert len(read_table(write(tmp_path, "1,2\n3,4\n"))) == 2


def test_missing_cells_are_read_on_request(tmp_path):
    path = write(tmp_path, "machine,a,b\nm1,,2\nm1,3,n/a\nm1,5,NaN\nm1,7,8\n")
    with pytest.raises(ValueError, match=r"line 2 .*'a' .*got ''"):
        read_table(path, "machine")
    assert read_table(path, "machine", missing=True).elements.isnan().sum(0).tolist() == [1, 2]
    path.write_text(path.read_text() + "m1,,\n")
    with pytest.raises(ValueError, match=r"line 6 .*all are missing"):
        read_table(path, "machine", missing=True)
    assert read_table(path, "machine", missing=True, skip_bad=True).skipped == ("line 6",)


# --- Parquet and frames -----------------------------------------------------------------------------------


def frame_of(kind: str):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {
            "machine": pandas.Categorical(["m1", "m2", "m1"]),
            "when": pandas.to_datetime(["2026-01-01", "2026-01-02", "2026-01-03"]),
            "a": [1, 2, 3],
            "b": [0.5, None, 2.5],
            "c": pandas.array([1, None, 3], dtype="Int64"),
            "state": ["ok", "ok", None],
        }
    )
    return frame if kind == "pandas" else pyarrow.Table.from_pandas(frame)


def test_group_names_are_the_same_in_a_csv_and_in_a_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    names = ["NA", "none", " m1", "m1 ", "-"]
    frame = pandas.DataFrame({"machine": names, "heat": range(5), "speed": range(5)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    found = [tables.read_frame(frame, "machine"), tables.read_table(tmp_path / "t.csv", "machine")]
    for examples in found:
        assert [examples.names[label] for label in examples.labels] == ["NA", "none", "m1", "m1", "-"]
    frame.loc[1, "machine"] = None
    with pytest.raises(ValueError, match=r"row 2 .*must name a group"):
        tables.read_frame(frame, "machine")


@pytest.mark.parametrize("least", [0, sys.maxsize])  # with pyarrow and without it
def test_booleans_are_text_in_all_tables(tmp_path, monkeypatch, least):
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(tables, "_MIN_FAST_BYTES", least)
    frame = pandas.DataFrame({"heat": [1.0, 2.5], "alarm": [True, False]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    for source in (frame, tmp_path / "t.parquet", tmp_path / "t.csv"):
        read = tables.read_frame if source is frame else read_table
        examples = read(source)
        assert (examples.columns, examples.ignored) == (("heat",), ("alarm (text)",))
        with pytest.raises(ValueError, match=r"'alarm' must be a number; got 'True'"):
            read(source, columns=("alarm",))


@pytest.mark.parametrize("kind", ["pandas", "pyarrow", "parquet"])
def test_frames_and_parquet_are_tables(tmp_path, kind):
    frame = frame_of(kind)
    if kind == "parquet":
        from pyarrow import parquet

        parquet.write_table(frame, tmp_path / "t.parquet")
        examples = read_table(tmp_path / "t.parquet", "machine", missing=True)
    else:
        examples = tables.read_frame(frame, "machine", missing=True)
    assert (examples.names, examples.columns) == (("m1", "m2"), ("a", "b", "c"))
    assert examples.labels.tolist() == [0, 1, 0]
    assert examples.ignored == ("when (date)", "state (text)")
    assert examples.elements.nan_to_num(-1).tolist() == [[1, 0.5, 1], [2, -1, -1], [3, 2.5, 3]]
    with pytest.raises(ValueError, match=r"row 2 cannot be used: 'b' .*nan"):
        tables.read_frame(frame, "machine")


def test_a_damaged_parquet_file_is_an_error(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"t.parquet: cannot be read as Parquet"):
        read_table(tmp_path / "t.parquet", "machine")
