"""A run folder from someone else: its links are not followed, and its files may hold anything."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny import MODEL, SETS, digits, trainer

import bruno
from bruno import Bruno
from bruno.config import DataConfig, Recipe
from bruno.reporting.page import report
from bruno.reporting.results import Result, read_results
from bruno.training.log import Log
from bruno.training.run import Run
from bruno.training.trainer import Trainer

RECIPE = Recipe(DataConfig("digits"), flow=MODEL.flow, train=SETS)
RESULT = Result("a", "A result", {}, picture=b"\x89PNG")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("received") / "run"
    torch.manual_seed(0)
    for _ in Run(folder).fit(Trainer(Bruno.from_config(MODEL), digits(), SETS), RECIPE):
        pass
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file outside the run."""
    path = tmp_path / "secret"
    path.write_text(json.dumps({"index": 1, "seconds": 1.0, "note": "a secret"}))
    return path


def replaced_by_link(path: Path, target: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(target)


# --- links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recipe.json", "log.jsonl", "results"])
def test_a_report_does_not_follow_links_out_of_the_run(run, secret, name):
    replaced_by_link(run / name, secret)
    with pytest.raises(ValueError, match=rf"{name}: .*got a link to {secret}"):
        Log(run).read(), read_results(run), Run(run).recipe


@pytest.mark.parametrize("name", ["a.json", "a.png"])
def test_a_linked_result_or_picture_is_not_in_the_report(run, secret, name):
    RESULT.write(run, config={}, seed=0)
    secret.write_bytes((run / "results" / name).read_bytes() + b" a secret")
    replaced_by_link(run / "results" / name, secret)
    with pytest.warns(UserWarning, match=rf"{name}.*link to {secret}"):
        page = report(run)
    assert "a secret" not in page.read_text()
    assert "A result" not in page.read_text()


def test_results_are_not_written_through_a_linked_folder(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    replaced_by_link(run / "results", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"results: .*got a link to .*elsewhere"):
        RESULT.write(run, config={}, seed=0)
    opened = bruno.open(run, device="cpu")
    with pytest.raises(ValueError, match=r"results: .*got a link to .*elsewhere"):
        opened.save_samples(opened.sample_prior(2), "samples")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["samples.npz", "a.json", "a.png"])
def test_a_linked_file_of_the_results_is_replaced(run, secret, name):
    before = secret.read_bytes()
    (run / "results").mkdir()
    (run / "results" / name).symlink_to(secret)
    opened = bruno.open(run, device="cpu")
    opened.save_samples(opened.sample_prior(2), "samples")
    RESULT.write(run, config={}, seed=0)
    assert secret.read_bytes() == before
    assert not (run / "results" / name).is_symlink()


@pytest.mark.parametrize("name", ["log.jsonl", "tensorboard", ".lock", "recipe.json"])
def test_a_resumed_training_does_not_write_through_links(run, secret, tmp_path, name):
    before = secret.read_bytes()
    target = secret
    if name == "tensorboard":
        target = tmp_path / "elsewhere"
        target.mkdir()
    replaced_by_link(run / name, target)
    longer = bruno.TrainConfig(steps=6, batch=4, set_size=5)
    recipe = Recipe(DataConfig("digits"), flow=MODEL.flow, train=longer)
    with pytest.raises(ValueError, match=rf"{name}.*got a link to {target}"):
        list(Run(run).fit(trainer(longer), recipe, resume=True))
    assert secret.read_bytes() == before
    assert not target.is_dir() or not list(target.iterdir())


def test_a_linked_checkpoint_is_not_read(run, tmp_path):
    newest = Run(run).checkpoints[-1]
    shutil.move(newest, tmp_path / "elsewhere")
    (run / "best.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="readable"), pytest.warns(UserWarning, match=r"link to .*elsewhere"):
        Run(run).model("best")
    newest.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"link to .*elsewhere"):
        Run(run).model()


def test_a_linked_calibration_is_neither_read_nor_replaced(run, secret):
    (run / "calibration.safetensors").symlink_to(secret)
    opened = bruno.open(run, device="cpu")
    with pytest.raises(ValueError, match=rf"calibration.safetensors: .*got a link to {secret}"):
        opened.kept_calibration()
    with pytest.raises(ValueError, match=rf"calibration.safetensors: .*got a link to {secret}"):
        opened.calibrate()
    assert (run / "calibration.safetensors").is_symlink()


def test_links_within_the_run_are_followed(run):
    (run / "log.jsonl").rename(run / "old.jsonl")
    (run / "log.jsonl").symlink_to("old.jsonl")
    assert Run(run).read_log()


# --- contents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["[]", "3", "null", "[" * 100_000, '{"data": 3}', "\x00", '{"train": 1}'])
def test_an_odd_recipe_is_an_error(run, content):
    (run / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=r"must|not JSON"):
        _ = Run(run).recipe


@pytest.mark.parametrize(
    "line",
    [
        '{"index": 1}', '{"index": 1, "seconds": "x"}', '{"index": 1, "seconds": null}', "[" * 100_000,
        '{"index": true, "seconds": 1}', '{"index": 1, "seconds": 1, "bits_per_dim": "x"}',
        '{"index": 1, "seconds": 1, "bits_per_dim": []}', '{"index": 1, "seconds": Infinity}',
        '{"index": 1e400, "seconds": 1}', '{"index": -1, "seconds": 1}', "3", "null",
        '{"index": ' + "9" * 400 + ', "seconds": 1}',
    ],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_odd_lines_of_a_log_are_left_out(run, line):
    before = Run(run).read_log()
    with (run / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    assert Run(run).read_log() == before
    assert report(run).is_file()


def test_a_posterior_named_like_a_checkpoint_is_not_used(run):
    model = Run(run).model()
    bruno.save(model.prior(), run / "checkpoint-99999999.safetensors")
    with pytest.warns(UserWarning, match=r"checkpoint-99999999.*'posterior'"):
        assert Run(run).model().fingerprint() == model.fingerprint()
    shutil.copy(run / "checkpoint-99999999.safetensors", run / "best.safetensors")
    with pytest.warns(UserWarning, match=r"best.*'posterior'"), pytest.raises(ValueError, match="readable"):
        Run(run).model("best")


def test_a_named_pipe_in_place_of_a_file_does_not_block(run):
    (run / "results").mkdir()
    os.mkfifo(run / "results" / "a.json")
    with pytest.warns(UserWarning, match=r"a.json.*named pipe"):
        assert read_results(run) == []
    for name in ("recipe.json", "log.jsonl"):
        (run / name).unlink()
        os.mkfifo(run / name)
    with pytest.raises(ValueError, match=r"recipe.json"):
        _ = Run(run).recipe
    assert Run(run).read_log() == []
