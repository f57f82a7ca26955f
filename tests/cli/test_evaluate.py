"""`bruno evaluate`."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import bruno
from bruno.data import load_examples
from cli.commandline import SMALL, make_images, run, values_of


def test_bits_per_dim_are_measured_at_every_position(tiny):
    assert "mean" in run("evaluate", "run", "--sets", "6")
    bits = values_of("run", "bits-test")
    assert len(bits["by_position"]) == 20
    assert math.isclose(sum(bits["by_position"]) / 20, bits["mean"], rel_tol=1e-6)
    assert bits["by_position"][0] == bits["first"]


def test_the_command_reports_what_the_library_measures(tiny):
    run("evaluate", "run", "--sets", "4", "--set-size", "3", "--seed", "7")
    measured = bruno.open("run").evaluate(sets=4, set_size=3, seed=7).bits
    printed = values_of("run", "bits-test")
    assert (printed["mean"], printed["error"]) == (measured.mean, measured.error)
    assert printed["by_position"] == list(measured.by_position)


def test_the_best_checkpoint_can_be_measured(tiny):
    run("evaluate", "run", "--checkpoint", "best", "--sets", "4")
    with pytest.raises(ValueError, match=r"`checkpoint` .*'last' or 'best'; got 'first'"):
        run("evaluate", "run", "--checkpoint", "first")


def test_a_run_without_validation_has_no_best_checkpoint(workplace):
    run("train", "digits", "--steps", "1", "--out", "blind", *SMALL, "--validate", "0")
    with pytest.raises(ValueError, match=r"`checkpoint` must be 'last' .*blind"):
        run("evaluate", "blind", "--checkpoint", "best")


def bits(*arguments: object) -> float:
    run("evaluate", *arguments)
    (path,) = Path(str(arguments[0]), "results").glob("bits-*.json")
    found = json.loads(path.read_text())["values"]["mean"]
    path.unlink()
    return found


def test_a_model_of_inverted_images_inverts_its_input(workplace):
    make_images({f"class{i}": 4 for i in range(2)}, 8)  # with two classes, all splits are the same
    for path in Path("images").rglob("*.png"):
        Image.fromarray(255 - np.asarray(Image.open(path)) // 32).save(path)
    data = ["--set", "data.name=images", "--set", "data.invert=true", "--set", "train.set_size=4"]
    run("train", "digits", "--steps", "30", "--out", "run", *SMALL, "--validate", "0", *data)
    known = bits("run", "--set-size", "4")
    assert bits("run", "--data", "images", "--set-size", "4") == pytest.approx(known)
    assert bits("run", "--data", "images", "--set-size", "4", "--no-invert") > known + 1
    assert bits("run", "--data", "images", "--set-size", "4", "--invert") == pytest.approx(known)


def test_other_data_can_be_any_data_that_a_model_can_be_trained_on(tiny):
    digits = load_examples("digits", "test")
    np.savez("digits.npz", images=digits.elements.numpy() * 16, labels=digits.labels.numpy())
    assert "mean" in run("evaluate", "run", "--data", "digits.npz", "--sets", "4", "--set-size", "3")
    with pytest.raises(ValueError, match=r"`data` .*digits.*'digit'"):
        run("evaluate", "run", "--data", "digit")
    with pytest.raises(ValueError, match=r"`data` .*\(1, 8, 8\); drawn"):
        run("inspect", "run", "--data", "drawn")


def test_all_of_the_user_data_is_used(tiny):
    make_images({"a": 3, "b": 3}, 8)
    with pytest.raises(ValueError, match=r"`split` .*images"):
        run("evaluate", "run", "--data", "images", "--split", "test")
