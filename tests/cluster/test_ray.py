"""Sets spread over the workers of a local cluster, compared with one process."""

import copy
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.data
import torch
from local_cluster import local_cluster
from pages import ROOT, run_python

import bruno.ray
from bruno import Bruno, Evidence, FlowConfig, ModelConfig
from bruno.ray import jobs
from bruno.streams.encoder import encoder_of
from bruno.tasks.anomaly import leave_one_out_scores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # files of the cluster
]
COLUMNS = ["heat", "load", "noise"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster whose processes work in a folder with examples/: workers find relative paths there."""
    folder = tmp_path_factory.mktemp("cluster")
    shutil.copytree(ROOT / "examples", folder / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with local_cluster():
            yield


def model_of(shape: tuple[int, ...], levels: int) -> Bruno:
    """A model with random weights."""
    torch.manual_seed(0)
    flow = FlowConfig("dense", couplings=2, units=16)
    model = Bruno.from_config(ModelConfig(shape, levels=levels, flow=flow))
    for weight in model.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Keys and rows; one key has a third of the rows."""
    random = np.random.default_rng(0)
    numbers = np.where(random.random(1200) < 1 / 3, 0, random.integers(0, 40, 1200))
    x = random.normal(size=(1200, 3)) + random.normal(size=(40, 3))[numbers]
    return np.array([f"machine {i}" for i in numbers], dtype=object), x


@pytest.fixture
def mortal(tmp_path, monkeypatch):
    """A function that lets the second call of a method kill its process, once; returns the marker of that."""

    def change(name: str, method: str) -> Path:
        marker, whole = tmp_path / f"{name}.{method}", getattr(jobs, name)

        class Mortal(whole):  # a local class travels to workers by value
            pass

        def killed_once(self, *arguments):
            try:
                with open(marker.with_suffix(".calls"), "a") as calls:
                    calls.write(".")
                if marker.with_suffix(".calls").stat().st_size >= 2:
                    os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
            return getattr(whole, method)(self, *arguments)

        setattr(Mortal, method, killed_once)
        monkeypatch.setattr(jobs, name, Mortal)
        return marker

    return change


def dataset(keys: np.ndarray, x: np.ndarray, blocks: int) -> "ray.data.Dataset":
    columns = {"number": np.arange(len(x)), "machine": keys.tolist()}
    table = pa.table(columns | dict(zip(COLUMNS, x.T, strict=True)))
    size = -(-len(x) // blocks)
    return ray.data.from_arrow([table.slice(i, size) for i in range(0, len(x), size)])


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert (np.abs(found - expected) <= tolerance * (1 + np.abs(expected))).all()


PASSES = {"Encoder": "__call__", "MergeEvidence": "aggregate_block", "Scoring": "score"}


@pytest.mark.parametrize(
    ("passes", "blocks", "far"),
    [
        pytest.param([], 2, False, id="no worker killed"),
        pytest.param([], 2, True, id="rows far from all others"),
        pytest.param([*PASSES], 4, True, id="one worker killed in each pass"),
    ],
)
@pytest.mark.long
def test_scores_match_a_single_process(cluster, rows, mortal, passes, blocks, far):
    keys, x = rows[0], rows[1].copy()
    if far:  # they take another pass over the data
        x[7, 0], x[900, 1] = 1e8, -1e6
    model = model_of((3,), 0)
    killed = [mortal(name, PASSES[name]) for name in passes]
    scored = bruno.ray.score(dataset(keys, x, blocks), model, "machine", columns=COLUMNS)
    assert all(marker.exists() for marker in killed)
    found = scored.to_pandas().sort_values("number")
    assert list(found.columns) == ["number", "machine", *COLUMNS, "score", "log_prob", "others"]
    np.testing.assert_array_equal(found[COLUMNS].to_numpy(), x)

    z, log_det = encoder_of(model)(x)
    process, latents = copy.deepcopy(model.process).double(), torch.from_numpy(z)
    for key in set(keys):
        inside = np.flatnonzero(keys == key)
        given = process.leave_one_out_log_prob(latents[inside])
        expected = (given - process.log_prob(latents[inside])).numpy()
        assert_close(found["score"].to_numpy()[inside], expected, 1e-9)
        assert_close(found["log_prob"].to_numpy()[inside], given.numpy() + log_det[inside], 1e-9)
        assert (found["others"].to_numpy()[inside] == len(inside) - 1).all()
        usual = inside[np.abs(x[inside]).max(1) < 100]  # float32 has lost the others beside an element of 1e8
        if len(usual) == len(inside):
            alone = leave_one_out_scores(model, torch.from_numpy(x[inside]))
            assert_close(found["score"].to_numpy()[inside], alone.numpy(), 1e-5)


@pytest.mark.long
def test_posteriors_and_classes_of_images_match_a_single_process(cluster, tmp_path):
    random, model = np.random.default_rng(0), model_of((1, 4, 4), 8)
    labels = random.integers(0, 3, 90)
    images = (random.integers(0, 4, (90, 4, 4)) + 2 * labels[:, None, None]).astype(np.uint8)
    items = zip(range(90), images, labels.tolist(), strict=True)
    rows = [{"number": i, "image": image, "label": label} for i, image, label in items]
    data = ray.data.from_items(rows, override_num_blocks=3)
    bruno.ray.condition(data, model, "label").write_parquet(str(tmp_path / "classes"))

    found = bruno.ray.posteriors(tmp_path / "classes", model)
    assert sorted(found) == [0, 1, 2]
    z = encoder_of(model)(torch.from_numpy(images[:, None])).z
    for label, posterior in found.items():
        expected = Evidence.of(torch.from_numpy(z[labels == label]))
        assert posterior.evidence.count == expected.count
        # Latents of float32 depend on the batch.
        assert_close(posterior.evidence.mean.numpy(), expected.mean.numpy(), 1e-5)
        assert_close(posterior.evidence.scatter.numpy(), expected.scatter.numpy(), 1e-5)

    classified = bruno.ray.classify(data, model, tmp_path / "classes", prior={0: 1, 1: 1, 2: 2})
    probabilities = np.stack(classified.to_pandas().sort_values("number")["probabilities"])
    batch = bruno.Posterior.stack([found[label] for label in range(3)])
    log_prob = batch.log_prob(torch.from_numpy(images[:, None, None])).double()
    expected = (log_prob + torch.tensor([0.25, 0.25, 0.5]).double().log()).softmax(1)
    assert_close(probabilities, expected.numpy(), 1e-5)


def test_arguments_are_checked_before_the_work(cluster, rows):
    data, model = dataset(*rows, 1), model_of((3,), 0)
    with pytest.raises(ValueError, match=r"`key`.*number, machine.*'machin'"):
        bruno.ray.score(data, model, "machin", columns=COLUMNS)
    with pytest.raises(ValueError, match=r"`columns`.*'cold'"):
        bruno.ray.score(data, model, "machine", columns=["heat", "load", "cold"])
    with pytest.raises(ValueError, match=r"`columns` must be 3.*got 2"):
        bruno.ray.condition(data, model, "machine", columns=COLUMNS[:2])
    with pytest.raises(ValueError, match="`columns` must name"):
        bruno.ray.condition(data, model, "machine")
    with pytest.raises(TypeError, match=r"`dataset`.*list"):
        bruno.ray.condition([1.0], model, "machine")
    with pytest.raises(ValueError, match="`support`"):
        bruno.ray.classify(data, model, pa.table({"a": [1]}), columns=COLUMNS)
    other = jobs._table(jobs.KeyedEvidence.of(pa.array(["a", "b"]), np.zeros((2, 3))), "class", "0" * 16)
    with pytest.raises(ValueError, match=r"model.*0000000000000000"):
        bruno.ray.classify(data, model, other, columns=COLUMNS)


def test_errors_of_workers_are_one_line(cluster, rows):
    keys, x = rows[0][:20].copy(), rows[1][:20]
    keys[13] = None
    with pytest.raises(ValueError, match=r"^`key`.*'machine'.*without\.$"):
        bruno.ray.condition(dataset(keys, x, 1), model_of((3,), 0), "machine", columns=COLUMNS)


@pytest.mark.filterwarnings("default")  # the model of the page is trained for a few steps
def test_the_blocks_of_the_page_run_and_agree_with_one_process(cluster):
    names = run_python(ROOT / "docs" / "cluster.md")
    trained, machines = names["trained"], names["machines"].to_pandas()
    rows = torch.from_numpy(
        machines[list(trained.recipe.data.columns) or machines.columns[1:]].to_numpy(np.float64)
    )
    found = names["scored"].to_pandas()
    np.testing.assert_array_equal(found["machine"], machines["machine"])
    for machine, inside in machines.groupby("machine").indices.items():
        alone = leave_one_out_scores(trained.model, rows[inside])
        assert_close(found["score"].to_numpy()[inside], alone.numpy(), 1e-5)
        assert (found["others"].to_numpy()[inside] == len(inside) - 1).all()
        if machine == 1:
            expected = trained.model.condition(rows[inside]).evidence
            assert names["posterior"].evidence.count == expected.count
            assert_close(names["posterior"].evidence.mean.numpy(), expected.mean.numpy(), 1e-5)

    classified = bruno.ray.classify(names["machines"], trained, "posteriors").to_pandas()
    support = {key: rows[inside] for key, inside in machines.groupby("machine").indices.items()}
    expected = trained.classify(rows, support).probabilities
    assert_close(np.stack(classified["probabilities"]), expected.numpy(), 1e-4)
