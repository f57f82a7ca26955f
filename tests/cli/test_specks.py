"""`bruno specks`."""

import pytest

import bruno
from cli.commandline import picture_of, run, values_of


def test_the_command_reports_what_the_library_measures(tiny):
    options = ["--samples", "20", "--given", "3", "--temperature", "0.9", "--seed", "7"]
    assert "with specks %" in run("specks", "run", *options)
    measured = bruno.open("run").measure_specks(samples=20, given=3, temperature=0.9, seed=7)
    printed = values_of("run", "specks-test")
    assert measured.data == printed["split"] == "test"
    for name in ("share", "error", "samples", "given", "temperature", "data_share", "data_images"):
        assert printed[name] == getattr(measured.result, name)
    assert picture_of("run", "specks-test").std() > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "1"], r"`--samples` .*at least 2; got 1"),
        (["--given", "0"], r"`--given` .*at least 1; got 0"),
        (["--given", "1000"], r"`given` .*got 1000"),
        (["--temperature", "-1"], r"`--temperature` .*at least 0; got -1"),
    ],
)
def test_a_mistake_names_the_option_and_its_value(tiny, arguments, message):
    with pytest.raises(ValueError, match=message):
        run("specks", "run", *arguments)
