"""Tables are checked against the limit on memory before they are read, and streams line by line."""

import io

import pytest
import torch

from bruno.data import ElementReader, load_path
from bruno.data.reader import Element, collected
from bruno.data.tables import read_table


@pytest.fixture
def limit(monkeypatch):
    """Set the limit on memory, in bytes."""
    return lambda amount: monkeypatch.setenv("BRUNO_MAX_MEMORY", str(amount))


def test_a_text_file_is_not_read_beyond_the_limit(tmp_path, limit, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 1000)
    limit(5000)
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: pytest.fail(f"read {path}"))
    with pytest.raises(ValueError, match=r"a.csv: its text in memory .*BRUNO_MAX_MEMORY"):
        read_table(path)


@pytest.mark.slow
def test_short_cells_need_more_memory_than_their_text(tmp_path, limit):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 1000)
    limit(100_000)
    with pytest.raises(ValueError, match=r"a.csv: its rows in memory .*BRUNO_MAX_MEMORY"):
        read_table(path)
    limit(200_000)
    assert len(read_table(path)) == 1000


def test_a_sparse_file_of_terabytes_is_rejected_at_once(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(ValueError, match=r"a.csv: .*at most 4.0 GiB; got 8,192.0 GiB"):
        load_path(path)


def test_parquet_of_one_repeated_number_is_rejected_by_its_number_of_rows(tmp_path, limit):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": [1.0] * 100_000, "b": [2.0] * 100_000}), path)
    assert path.stat().st_size < 20_000
    limit(2_000_000)
    with pytest.raises(ValueError, match=r"a.parquet: its cells .*BRUNO_MAX_MEMORY"):
        read_table(path)
    limit(10_000_000)
    assert len(read_table(path)) == 100_000


def test_parquet_of_one_repeated_long_text_is_read_in_parts(tmp_path, limit):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, rows = tmp_path / "a.parquet", 50_000
    groups = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), ["x" * 1000])
    parquet.write_table(pyarrow.table({"g": groups.cast("string"), "a": [1.0] * rows}), path)
    assert path.stat().st_size < 20_000
    limit(20_000_000)
    with pytest.raises(ValueError, match=r"a.parquet: its cells .*BRUNO_MAX_MEMORY"):
        read_table(path, "g")


@pytest.mark.parametrize("shape", [(2,), (1, 4, 4)])
def test_a_stream_without_line_breaks_is_an_error(monkeypatch, shape):
    monkeypatch.setattr("bruno.data.table_rows._MAX_LINE", 1000)
    reader = ElementReader(shape, 256 if len(shape) > 1 else 0)
    with pytest.raises(ValueError, match=r"at most 1,000 characters"):
        list(reader.read_lines(io.StringIO("1" * 2000)))


def test_a_file_without_line_breaks_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("bruno.data.table_rows._MAX_LINE", 1000)
    (tmp_path / "a.csv").write_text("1,2\n" * 300 + "1" * 2000)
    with pytest.raises(ValueError, match=r"at most 1,000 characters"):
        list(ElementReader((2,), 0).read([tmp_path / "a.csv"]))


def test_elements_are_collected_within_the_limit(limit):
    limit(10_000)
    read = (Element(str(i), torch.zeros(2)) for i in range(10**9))
    with pytest.raises(ValueError, match=r"the elements in memory .*BRUNO_MAX_MEMORY"):
        collected(read)
