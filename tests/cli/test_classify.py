"""`bruno classify`."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import bruno
from cli.commandline import picture_of, run, values_of
from cli.conftest import UNSEEN

pytestmark = pytest.mark.filterwarnings("ignore::bruno.trained.UnfamiliarDataWarning")  # enlarged images
SUPPORT = ["--support", "support"]


@pytest.mark.slow
def test_user_images_are_classified_and_each_has_a_row_of_the_picture(in_digits, pictures):
    run("classify", "run", "queries/2/2-00.png", *SUPPORT)
    of_one = picture_of("run", "classification")
    run("classify", "run", *(f"queries/{name}" for name in UNSEEN), *SUPPORT)
    of_many = picture_of("run", "classification")
    assert len(of_many) - len(of_one) == pytest.approx(29 * 60, abs=60)  # pixels: 30 rows and one
    values = values_of("run", "classification")
    assert values["classes"] == list(UNSEEN)
    assert np.allclose(np.sum(values["probabilities"], 1), 1)
    predicted = np.array(UNSEEN)[np.argmax(values["probabilities"], 1)]
    true = np.array([Path(name).parent.name for name in values["images"]])
    for name in UNSEEN:
        assert (predicted[true == name] == name).mean() >= 0.7


def test_the_command_reports_what_the_library_finds(in_digits):
    run("classify", "run", "queries/8", *SUPPORT, "--prior", "1,2,3", "--temperature", "2")
    found = bruno.open("run").classify("queries/8", "support", prior=[1, 2, 3], temperature=2)
    values = values_of("run", "classification")
    assert values["classes"] == list(found.classes)
    np.testing.assert_allclose(values["probabilities"], found.probabilities.tolist(), rtol=1e-6)


def test_a_prior_shifts_the_probabilities(in_digits):
    queries = ["queries/8/8-00.png", "queries/8/8-01.png"]
    run("classify", "run", *queries, *SUPPORT)
    uniform = np.array(values_of("run", "classification")["probabilities"])
    run("classify", "run", *queries, *SUPPORT, "--prior", "0.998,0.001,0.001")
    biased = np.array(values_of("run", "classification")["probabilities"])
    assert (biased[:, 0] > uniform[:, 0]).all()


def test_the_temperature_can_be_fitted(in_digits):
    output = run("classify", "run", "queries/8/8-00.png", *SUPPORT, "--calibrate")
    assert re.search(r"temperature \d+\.\d+, from \d+ episodes", output)
    assert 0.1 < values_of("run", "classification")["temperature"] < 10


def test_files_that_cannot_be_read_are_skipped_on_request(in_digits, tmp_path):
    shutil.copytree("queries/8", tmp_path / "8")
    bad = tmp_path / "8" / "bad.png"
    bad.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bad.png: cannot be used"):
        run("classify", "run", bad.parent, *SUPPORT)
    output = run("classify", "run", bad.parent, *SUPPORT, "--skip-bad")
    assert f"skipped 1 unreadable element, first {bad}" in output


def test_hidden_folders_are_not_classes(in_digits, tmp_path):
    support = shutil.copytree("support", tmp_path / "support")
    shutil.copytree(support / "2", support / "__MACOSX")
    (support / ".cache").mkdir()
    run("classify", "run", "queries/2/2-00.png", "--support", support)
    assert values_of("run", "classification")["classes"] == list(UNSEEN)


def test_files_of_the_same_name_are_shown_with_their_folders(in_digits, tmp_path):
    same = [tmp_path / name / "same.png" for name in ("2", "5")]
    for path in same:
        path.parent.mkdir()
        shutil.copy(f"support/{path.parent.name}/{path.parent.name}-00.png", path)
    output = run("classify", "run", *same, *SUPPORT)
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    shown = "".join(image.strip() for _, image, *_ in rows)  # a long path is folded
    assert all(f"{path.parent.name}/same.png" in shown for path in same)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["queries/2", *SUPPORT, "--data", "digits"], r"`data` .*`calibrate`"),
        (["queries/2", "--support", "queries/2"], r"`support` .*two class.*queries/2 has 0"),
        (["queries/2", "--support", "nowhere"], r"`support` .*nowhere"),
        (["run/log.jsonl", *SUPPORT], r"log.jsonl: cannot be used"),
        (["queries/2", *SUPPORT, "--prior", "a"], r"`--prior` .*got 'a'"),
        (["queries/2", *SUPPORT, "--prior", "1,2"], r"`prior` .*3 classes; got \[1.0, 2.0\]"),
        (["queries/2", *SUPPORT, "--temperature", "0"], r"`--temperature` .*got 0"),
        (["queries/2", *SUPPORT, "--calibrate", "--temperature", "2"], r"`calibrate` .*omit `temperature`"),
    ],
)
def test_a_mistake_names_the_option_and_its_value(in_digits, arguments, message):
    with pytest.raises(ValueError, match=message):
        run("classify", "run", *arguments)
