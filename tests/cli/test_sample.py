"""`bruno sample` and `bruno repeat`."""

import re

import numpy as np
import pytest

import bruno
from cli.commandline import picture_of, run, values_of, words

pytestmark = pytest.mark.filterwarnings("ignore::bruno.trained.UnfamiliarDataWarning")  # enlarged images


def saved(folder, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / "results" / f"{name}.npz") as file:
        return dict(file)


def test_samples_from_the_prior(in_digits):
    run("sample", "run", "--prior", "--samples", "9")
    assert saved(in_digits, "samples-prior")["samples"].shape == (9, 1, 8, 8)


def test_samples_after_each_image_of_a_folder(in_digits):
    run("sample", "run", "--given", "support/2", "--samples", "3")
    found = saved(in_digits, "samples")
    assert found["samples"].shape == (1, 6, 3, 1, 8, 8)  # one set
    assert found["inputs"].shape == (1, 5, 1, 8, 8)
    assert found["seen"].tolist() == [0, 1, 2, 3, 4, 5]
    assert 0 < found["samples"].max() <= 16


def test_the_command_saves_the_samples_of_the_library(in_digits):
    run("sample", "run", "--given", "support/2", "--samples", "3", "--seed", "5")
    samples = bruno.open("run").sample("support/2", samples=3, seed=5).samples
    np.testing.assert_array_equal(saved(in_digits, "samples")["samples"], samples.images.cpu().numpy())


@pytest.mark.parametrize("arguments", [["--prior"], ["--given", "support/2", "--prefixes", "0,5"]])
def test_many_samples_are_written_in_parts_and_some_are_shown(in_digits, monkeypatch, arguments):
    monkeypatch.setattr(
        "bruno.trained.sample_files._PIXELS_SHOWN", 3 * 64 * (1 if "--prior" in arguments else 2)
    )
    output = run("sample", "run", *arguments, "--samples", "300", "--seed", "3")
    name, shown = ("samples-prior", "3 of 300") if "--prior" in arguments else ("samples", "6 of 600")
    assert f"The picture shows {shown} samples; all are in {name}.npz." in words(output)
    trained = bruno.open("run")
    samples = (
        trained.sample_prior(300, seed=3)
        if "--prior" in arguments
        else trained.sample("support/2", prefixes=(0, 5), samples=300, seed=3).samples
    )
    np.testing.assert_array_equal(saved(in_digits, name)["samples"], samples.images.cpu().numpy())
    assert values_of("run", name)["clamped"] == samples.clamped


def test_samples_that_cannot_fit_on_the_disk_are_an_error(in_digits):
    with pytest.raises(ValueError, match=r"`samples` .*disk.*1000000000000000000"):
        run("sample", "run", "--samples", 10**18)


def test_an_interrupted_sampling_leaves_no_files(in_digits, monkeypatch):
    def interrupted(*arguments, **options):
        yield from ()
        raise KeyboardInterrupt

    before = sorted(in_digits.rglob("*"))
    monkeypatch.setattr("bruno.trained.generation.draw_in_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bruno.open("run").write_samples(prior=True)
    assert sorted(in_digits.rglob("*")) == before


def test_samples_after_some_prefixes_of_a_long_set(in_digits):
    run("sample", "run", "--set-size", "100", "--prefixes", "98-100", "--samples", "2")
    assert values_of("run", "samples")["seen"] == [98, 99, 100]
    assert picture_of("run", "samples").std() > 10


def test_samples_of_several_sets_are_of_different_classes(in_digits):
    run("sample", "run", "--sets", "3", "--set-size", "4", "--prefixes", "0,1,4", "--samples", "2")
    found = saved(in_digits, "samples")
    assert found["samples"].shape == (3, 3, 2, 1, 8, 8)
    assert found["inputs"].shape == (3, 4, 1, 8, 8)
    assert len(np.unique(found["inputs"][:, 0], axis=0)) == 3


def test_the_more_often_an_image_was_seen_the_smaller_the_spread(in_digits):
    output = run("repeat", "run", "--given", "support/5/5-00.png")
    assert "mean variance of a pixel" in output
    variance = values_of("run", "samples-repeats")["variance"]
    assert variance[-1] < variance[0]
    assert picture_of("run", "samples-repeats").std() > 3


def test_the_numbers_of_repeats_can_be_chosen(in_digits):
    run("repeat", "run", "--set-size", "1", "--repeats", "3,480-482")
    assert values_of("run", "samples-repeats")["seen"] == [3, 480, 481, 482]


def test_files_that_cannot_be_read_are_skipped_on_request(in_digits, tmp_path):
    good, bad = in_digits.resolve().parent / "support" / "2" / "2-00.png", tmp_path / "bad.png"
    (tmp_path / "good.png").write_bytes(good.read_bytes())
    bad.write_bytes(b"no image")
    with pytest.raises(ValueError, match=re.escape(str(bad))):
        run("sample", "run", "--given", tmp_path, "--samples", "1")
    output = run("sample", "run", "--given", tmp_path, "--samples", "1", "--skip-bad")
    assert f"skipped 1 unreadable element, first {bad}" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sets", "4"], r"`sets` .*3, the number of classes; got 4"),
        (["--set-size", "999"], r"`set_size` .*got 999"),
        (["--given", "nowhere.png"], r"nowhere\.png"),
        (["--prefixes", "1,0"], r"`prefixes` .*got 0 after 1"),
        (["--prefixes", "0-9999"], r"`prefixes` .*8, the set size; got 9"),
        (["--prefixes", "5-2"], r"`--prefixes` .*got '5-2'"),
        (["--prefixes", "1-2-3"], r"`--prefixes` .*got '1-2-3'"),
        (["--prefixes", "a"], r"`--prefixes` .*got 'a'"),
        (["--prefixes", "0-1000000000"], r"`--prefixes` .*10,000 .*got '0-1000000000'"),
        (["--prior", "--split", "train"], r"`prior` .*omit `split`"),
        (["--prior", "--data", "digits"], r"`prior` .*omit `data`"),
        (["--prior", "--given", "support/2"], r"`prior` .*omit `given`"),
        (["--prior", "--set-size", "5"], r"`prior` .*omit `set_size`"),
        (["--prior", "--prefixes", "0,1"], r"`prior` .*omit `prefixes`"),
        (["--prior", "--sets", "2"], r"`prior` .*omit `sets`"),
        (["--given", "support/2", "--data", "digits"], r"`given` .*omit `data`"),
        (["--given", "support/2", "--set-size", "5"], r"`given` .*omit `set_size`"),
        (["--temperature", "nan"], r"`--temperature` .*at least 0; got nan"),
        (["--samples", "0"], r"`--samples` .*at least 1; got 0"),
    ],
)
def test_a_mistake_names_the_option_and_its_value(in_digits, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("sample", "run", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], r"`--samples` .*at least 1; got 0"),
        (["--given", "support/2", "--set-size", "5"], r"`given` .*omit `set_size`"),
        (["--given", "support/2", "--split", "test"], r"`given` .*omit `split`"),
        (["--temperature", "-1"], r"`--temperature` .*at least 0; got -1"),
        (["--repeats", "0,1"], r"`repeats` .*got \(0, 1\)"),
        (["--repeats", "5-2"], r"`--repeats` .*got '5-2'"),
    ],
)
def test_a_mistake_in_repeating_names_the_option_and_its_value(in_digits, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("repeat", "run", *arguments)


def test_a_model_must_exist():
    with pytest.raises(ValueError, match=r"`model` .*nowhere .*omniglot, omniglot-small"):
        run("sample", "nowhere")
    with pytest.raises(ValueError, match=r"`model` .*omnigolt .*did you mean 'omniglot'\?"):
        run("sample", "omnigolt")


def test_a_model_file_has_no_checkpoints(in_digits):
    with pytest.raises(ValueError, match=r"`checkpoint` .*model.safetensors"):
        run("sample", "run/model.safetensors", "--checkpoint", "best")
