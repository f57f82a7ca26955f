"""Runs and files that the tests of several commands share."""

import inspect
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import bruno
from bruno.data import load_examples

UNSEEN = ("2", "5", "8")  # digits that no run is trained on


@pytest.fixture(autouse=True)
def pictures(request) -> None:
    """Render pictures only for the tests that look at them, which name this fixture."""
    if "pictures" not in inspect.signature(request.function).parameters:
        request.getfixturevalue("without_pictures")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """A run of a few steps, for tests that need any model; copy it to write to it."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    flow = {"units": 16, "couplings": 2}
    bruno.train("digits", folder, steps=3, batch=4, flow=flow, validation_sets=4, save_every=0, device="cpu")
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(tiny_run, workplace) -> Path:
    """A copy of the tiny run, in ./run."""
    shutil.copytree(tiny_run, "run")
    return Path("run")


@pytest.fixture(scope="session")
def digits(tmp_path_factory, digits_run) -> Path:
    """A folder with a run on digits, and images of the unseen digits as files, larger than the model's.

    run/ is the run; support/DIGIT/, queries/DIGIT/ and collection/ are the images, named DIGIT-NUMBER.png.
    """
    folder = tmp_path_factory.mktemp("digits")
    shutil.copytree(digits_run, folder / "run")
    unseen = load_examples("digits", "test")
    for label, name in enumerate(UNSEEN):
        images = unseen.elements[unseen.labels == label][:40, 0].numpy()
        for part, some in (("support", images[:5]), ("collection", images[5:25]), ("queries", images[25:35])):
            place = folder / part / (name if part != "collection" else "")
            place.mkdir(parents=True, exist_ok=True)
            for i, pixels in enumerate(some):
                image = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
                image.resize((24, 24)).save(place / f"{name}-{i:02d}.png")
    return folder


@pytest.fixture
def in_digits(digits, monkeypatch) -> Path:
    """Work in the folder of `digits`; returns its run, as ./run."""
    monkeypatch.chdir(digits)
    return Path("run")


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory) -> Path:
    """A run of two columns, heat and speed, of 16 machines."""
    folder, random = tmp_path_factory.mktemp("keyed"), np.random.default_rng(0)
    rows = random.normal(60, 5, (16, 1, 2)) + random.normal(0, 1, (16, 20, 2))
    table = folder / "machines.csv"
    table.write_text(
        "machine,heat,speed\n" + "".join(f"m{m},{a},{b}\n" for m in range(16) for a, b in rows[m])
    )
    data = {"name": str(table), "group": "machine"}
    bruno.train("table", folder / "run", data=data, steps=3, validation_sets=0, device="cpu")
    return folder / "run"
