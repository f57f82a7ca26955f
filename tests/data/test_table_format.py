"""How a table is written: detected from its lines, and rows that stray quotes do not swallow."""

import pytest

from bruno.data import ElementReader, tables
from bruno.data.table_format import TableFormat, detect
from bruno.data.table_rows import split_rows
from bruno.data.tables import read_table

ROWS = (("m1", 1234.5, -0.25), ("m1", 2.0, 12345678.0), ("m2", 3.75, 4.5))


def spelled(number: float, decimal: str, thousands: str) -> str:
    english = f"{number:,.3f}"
    return english.translate(str.maketrans({",": thousands, ".": decimal}))


def table(delimiter: str, decimal: str, thousands: str, header: bool = True) -> str:
    lines = [["machine", "heat", "speed"]] * header
    lines += [[m, *(spelled(x, decimal, thousands) for x in numbers)] for m, *numbers in ROWS]
    quote = '"{}"'.format if delimiter in (decimal, thousands) else str
    return "".join(delimiter.join(map(quote, line)) + "\r\n" for line in lines)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize(
    ("decimal", "thousands"),
    [(".", ""), (",", ""), (".", ","), (",", "."), (",", " "), (",", "\u202f"), (".", "'")],
)
@pytest.mark.parametrize("header", [True, False])
def test_delimiters_and_separators_are_detected(tmp_path, monkeypatch, delimiter, decimal, thousands, header):
    path = tmp_path / "t.csv"
    path.write_text(table(delimiter, decimal, thousands, header), newline="", encoding="utf-8")
    found = []
    for least in (0, 2**20):  # parsed by pyarrow if it is installed, and in Python
        monkeypatch.setattr(tables, "_MIN_FAST_BYTES", least)
        found.append(read_table(path, "machine" if header else "1"))
    for examples in found:
        assert examples.names == ("m1", "m2")
        assert examples.elements.tolist() == [list(numbers) for _, *numbers in ROWS]
    assert str(found[0].table_format) == str(found[1].table_format)


def test_a_format_is_named_in_words(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("machine;a\nm1;1.234\nm1;5.678\n")
    assert read_table(path, "machine").elements.flatten().tolist() == [1.234, 5.678]
    named = read_table(path, "machine", table_format="decimal-comma")
    assert named.elements.flatten().tolist() == [1234, 5678]
    assert TableFormat(**TableFormat.parse(named.table_format)) == TableFormat(
        delimiter=";", decimal=",", thousands="."
    )
    for words, message in (
        ("semicolom", r"got 'semicolom'.*'semicolon'"),
        ("comma tab", r"one word for the delimiter"),
        ("decimal-comma thousands-comma", r"different"),
    ):
        with pytest.raises(ValueError, match=rf"`format` .*{message}"):
            TableFormat.parse(words)


def test_the_training_format_is_chosen_if_several_fit():
    lines = ["machine;a\n", "m1;1.234\n"]
    trained = TableFormat(delimiter=";", decimal=",", thousands=".")
    assert detect(lines).number("1.234") == 1.234
    assert detect(lines, prefer=trained).number("1.234") == 1234
    assert detect(["machine;a\n", "m1;1.5\n"], prefer=trained).number("1.5") == 1.5
    assert detect(["machine,a\n", "m1,1.234\n"], prefer=trained).number("1.234") == 1.234


def test_a_model_reads_tables_in_other_formats():
    reader = ElementReader((2,), 0, group="machine", columns=("heat", "speed"))
    for lines in (
        ["speed;machine;heat\n", "2,5;m1;1\n"],
        ["time\tspeed\tmachine\theat\n", "12:00\t2.5\tm1\t1\n"],
        ["heat,speed,machine\n", '"1","2,5",m1\n'],
    ):
        [element] = reader.read_lines(lines)
        assert (element.x.tolist(), element.group) == ([1, 2.5], "m1")
    assert [element.x.tolist() for element in reader.read_lines(["1;2,5\n", "3;4\n"])] == [[1, 2.5], [3, 4]]


def test_a_stream_is_judged_as_its_lines_arrive():
    def lines():
        yield "heat,speed\n"
        yield "1,2\n"
        pytest.fail("the second row was requested before the first was returned")

    assert next(ElementReader((2,), 0, columns=("heat", "speed")).read_lines(lines())).x.tolist() == [1, 2]
    assert next(ElementReader((2,), 0).read_lines(iter(["1,2\n", "x"]))).x.tolist() == [1, 2]


# --- stray quotes -----------------------------------------------------------------------------------------

STRAY = 'm1,"5,x\n'


def long_table(*stray: int, note: str = "fine") -> list[str]:
    """A table of 400 rows in which some lines open a quote in the column a."""
    lines = ["machine,a,note\n", *(f"m{i % 4},{i},{note}\n" for i in range(400))]
    for line in stray:
        lines[line - 1] = STRAY
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("stray", [(100,), (100, 200), (100, 103), (100, 101), (401,)])
def test_a_stray_quote_swallows_no_row(tmp_path, stray):
    (tmp_path / "t.csv").write_text("".join(long_table(*stray)))
    with pytest.raises(ValueError, match=rf"t.csv: line {stray[0]} cannot be used: it opens a quote"):
        read_table(tmp_path / "t.csv", "machine")
    examples = read_table(tmp_path / "t.csv", "machine", skip_bad=True)
    assert examples.skipped == tuple(f"line {line}" for line in stray)
    assert len(examples) == 400 - len(stray)


@pytest.mark.parametrize("stray", [(100,), (100, 103), (401,)])
def test_a_stray_quote_swallows_no_row_of_a_stream(stray):
    reader = ElementReader((1,), 0, group="machine", columns=("a",))
    with pytest.raises(ValueError, match=rf"line {stray[0]}: cannot be used: it opens a quote"):
        list(reader.read_lines(long_table(*stray)))
    reader = ElementReader((1,), 0, group="machine", columns=("a",), skip_bad=True)
    assert len(list(reader.read_lines(long_table(*stray)))) == 400 - len(stray)
    assert reader.skipped == [f"line {line}" for line in stray]


def test_stray_quotes_in_a_column_that_is_not_read_are_errors(tmp_path):
    lines = long_table()
    lines[99], lines[100] = 'm1,1,"odd\n', 'm2,2,"\n'
    (tmp_path / "t.csv").write_text("".join(lines))
    with pytest.raises(ValueError, match=r"line 100 .*encloses rows up to line 101"):
        read_table(tmp_path / "t.csv", "machine")


def test_a_quoted_cell_may_span_a_few_lines(tmp_path):
    (tmp_path / "t.csv").write_text(
        'machine,a,note\nm1,1,"one\ntwo, three"\nm1,2,"say ""no"""\nm1,3,5" pipe\n'
    )
    examples = read_table(tmp_path / "t.csv", "machine")
    assert examples.elements.flatten().tolist() == [1, 2, 3]


def test_rows_keep_the_numbers_of_their_last_lines():
    rows = list(split_rows(["a,b\n", "\n", '"x\n', 'y",2\n', " , \n", "3,4"], ","))
    assert [(row.line, row.cells) for row in rows] == [(1, ["a", "b"]), (4, ["x\ny", "2"]), (6, ["3", "4"])]
