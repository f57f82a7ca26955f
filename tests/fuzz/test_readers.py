"""Nothing but ValueError and OSError escapes a reader, whatever is in the file."""

import warnings

import pytest

from fuzz.readers import READERS, failures

PARTS = 6  # of the cases; the first runs in every test run


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, PARTS))])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_raises_only_value_errors_and_os_errors(name, part, tmp_path, monkeypatch):
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(failures(name, range(part, READERS[name].cases, PARTS), tmp_path))
    report = "\n".join(f"seed {seed}: {type(error).__name__}: {error}" for seed, error in found[:20])
    assert not found, f"repeat with: python tests/fuzz/run.py --reader {name!r} --seed SEED\n{report}"
