"""Run the command line in this process, and make user files for it."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from bruno.cli.main import app, main
from bruno.cli.output import messages_printed

# A small model: a training step takes a few milliseconds.
SMALL = ["--set", "flow.units=16", "--set", "flow.couplings=2", "--set", "train.batch=4"]
SMALL += ["--device", "cpu", "--validate", "4", "--no-verdict"]


def run(*arguments: object, code: int = 0, stdin: str | None = None) -> str:
    """Run a command as `bruno` does, and return standard output and standard error, interleaved.

    Warnings are printed, not errors as elsewhere in the tests. Exceptions are raised.
    """
    names: dict[str, str] = {}
    with messages_printed(names):
        warnings.simplefilter("default")
        result = CliRunner().invoke(app, [*map(str, arguments)], input=stdin, obj=names)
    if code == 0 and result.exception:
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def words(text: str) -> str:
    """The text with line breaks and repeated spaces replaced by single spaces."""
    return " ".join(text.split())


class Ended(NamedTuple):
    """Exit code and output of the program."""

    code: int
    out: str
    errors: str


def run_main(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run the whole program, errors included, as the shell does."""
    with warnings.catch_warnings(), mock.patch.object(sys, "argv", ["bruno", *map(str, arguments)]):
        warnings.simplefilter("default")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
    out, errors = capsys.readouterr()
    return Ended(int(ended.value.code or 0), out, errors)


def values_of(run_folder: Path | str, name: str) -> dict[str, Any]:
    """The values of a result of a run, after a check that its provenance is recorded."""
    record = json.loads(Path(run_folder, "results", f"{name}.json").read_text("utf-8"))
    assert record["config"]["data"]["name"]
    assert record["provenance"]["packages"]["torch"]
    return record["values"]


def picture_of(run_folder: Path | str, name: str) -> np.ndarray:
    """The picture of a result, in grey."""
    with Image.open(Path(run_folder, "results", f"{name}.png")) as image:
        return np.asarray(image.convert("L"))


def make_images(counts: dict[str, int], size: int, folder: str = "images") -> None:
    """Write square images in class folders, `counts[name]` of each class."""
    pixels = np.random.default_rng(0).integers(0, 256, (size, size), dtype=np.uint8)
    for name, count in counts.items():
        Path(folder, name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(pixels + np.uint8(i)).save(Path(folder, name, f"{i}.png"))
