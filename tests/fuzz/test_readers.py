"""Nothing but ValueError and OSError escapes a reader, whatever is in the file."""

import warnings

import pytest

from fuzz.readers import READERS, failures


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("third", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2))])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_raises_only_value_errors_and_os_errors(name, third, tmp_path, monkeypatch):
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(failures(name, range(third, READERS[name].cases, 3), tmp_path))
    report = "\n".join(f"seed {seed}: {type(error).__name__}: {error}" for seed, error in found[:20])
    assert not found, f"repeat with: python tests/fuzz/run.py --reader {name!r} --seed SEED\n{report}"
