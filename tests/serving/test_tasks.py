"""The tasks of the service: the answers are those of the library."""

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from serving.service import images, in_base64, models, png, put, rows, served
from starlette.testclient import TestClient
from streams.keyed import calibration, trained

import bruno
from bruno import Bruno, FlowConfig, ModelConfig, Recipe
from bruno.config import DataConfig
from bruno.process import Evidence
from bruno.serving import create_app
from bruno.tasks.detector import Detector
from bruno.trained import Trained

GIVEN, NEW = rows(6, seed=1), rows(4, seed=2)
NAN = float("nan")


@pytest.fixture(scope="module")
def client():
    with served() as client:
        put(client, "machine", GIVEN)
        put(client, "other", NEW)
        yield client


def as_array(some):
    return np.array(some, dtype=float)


@pytest.fixture(scope="module")
def model():
    return models()["rows"].model


def test_scores_match_the_library(client, model):
    posterior = model.condition(as_array(GIVEN))
    expected = posterior.score(as_array(NEW)).numpy()
    for how in ({"set": "machine"}, {"given": GIVEN}):
        found = client.post("/score", json={"elements": NEW, **how}).json()
        np.testing.assert_allclose(found["scores"], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            found["log_probs"], posterior.log_prob(as_array(NEW)), rtol=1e-4, atol=1e-4
        )
        assert found["seen"] == len(GIVEN)


def test_without_a_set_the_score_is_0_and_the_density_that_of_the_prior(client, model):
    found = client.post("/score", json={"elements": NEW}).json()
    assert found["scores"] == [0.0] * len(NEW)
    np.testing.assert_allclose(found["log_probs"], model.prior().log_prob(as_array(NEW)), rtol=1e-4)


def test_missing_numbers_are_imputed_as_in_the_library(client, model):
    row = [NEW[0][0], None, *NEW[0][2:]]
    x = as_array([[NEW[0][0], NAN, *NEW[0][2:]]])
    expected = model.condition(as_array(GIVEN)).score(x).item()
    assert client.post("/score", json={"elements": [row], "set": "machine"}).json()["scores"] == [
        pytest.approx(expected, rel=1e-4)
    ]


COLUMNS = ("heat", "load", "flow", "noise")


@pytest.fixture(scope="module")
def named():
    """A client of two models with names of columns; `imputing` imputes missing cells, `complete` does not."""
    recipe = Recipe(DataConfig("machines.csv", columns=COLUMNS))
    complete = Bruno.from_config(ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=0)))
    models = {
        "imputing": replace(trained(), recipe=recipe),
        "complete": Trained(complete.requires_grad_(False), recipe, Path("nowhere")),
        "nameless": trained(),
    }
    with TestClient(create_app(models, store=":memory:"), base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.mark.parametrize("name", ["imputing", "complete"])
def test_a_row_may_be_an_object_with_names_of_columns(named, name):
    assert named.get("/models").json()["models"][0]["columns"] == list(COLUMNS)
    given = [dict(reversed(list(zip(COLUMNS, row, strict=True)))) for row in GIVEN]
    mixed = [dict(zip(COLUMNS, NEW[0], strict=True)), *NEW[1:]]
    of_lists = named.post(f"/score?model={name}", json={"elements": NEW, "given": GIVEN}).json()
    assert named.post(f"/score?model={name}", json={"elements": mixed, "given": given}).json() == of_lists


def test_a_column_that_an_object_does_not_have_is_a_missing_cell(named):
    objects = [{"heat": NEW[0][0], "noise": NEW[0][3]}]
    lists = [[NEW[0][0], None, None, NEW[0][3]]]
    of_objects, of_lists = (named.post("/score", json={"elements": rows}) for rows in (objects, lists))
    assert of_objects.json() == of_lists.json()
    answer = named.post("/score?model=complete", json={"elements": objects})
    assert (answer.status_code, answer.json()["error"]) == (
        422,
        "`elements[0]` must have the column 'load'; it is missing.",
    )


@pytest.mark.parametrize(
    ("model", "row", "message"),
    [
        ("imputing", {"heat": 1.0, "machine": "m1"}, "'machine'"),
        ("imputing", {"heat": "1"}, "`elements`"),
        ("imputing", {"heat": True}, "`elements`"),
        ("complete", dict.fromkeys(COLUMNS), "`elements`"),
        ("nameless", {"heat": 1.0}, "no names"),
    ],
)
def test_an_object_that_does_not_fit_is_refused(named, model, row, message):
    answer = named.post(f"/score?model={model}", json={"elements": [row]})
    assert answer.status_code == 422
    assert message in answer.json()["error"]


def test_objects_are_in_the_schema(named):
    content = named.get("/openapi.json").json()["paths"]["/score"]["post"]["requestBody"]["content"]
    element = content["application/json"]["schema"]["properties"]["elements"]["items"]
    assert {"type": "object", "additionalProperties": {"type": ["number", "null"]}} in element["anyOf"]


@pytest.mark.parametrize("hole", [False, True])
def test_classes_match_the_library(client, model, hole):
    queries = [[None if hole and i == 1 else x for i, x in enumerate(row)] for row in rows(3, seed=9)]
    support = {"a": "machine", "b": NEW, "c": "other"}
    prior = {"c": 1.0, "a": 2.0, "b": 1.0}
    body = {"elements": queries, "support": support, "prior": prior, "temperature": 3.0}
    found = client.post("/classify", json=body).json()
    sets = {"a": as_array(GIVEN), "b": as_array(NEW), "c": as_array(NEW)}
    expected = bruno.tasks.classification.classify(
        model, sets, as_array(queries), prior=[2.0, 1.0, 1.0], temperature=3.0
    )
    np.testing.assert_allclose(found["probabilities"], expected.probabilities, atol=1e-4)
    np.testing.assert_allclose(found["scores"], expected.scores, atol=1e-3)
    assert found["labels"] == [expected.classes[i] for i in expected.labels]
    assert found["p"] is None


def test_elements_are_ranked_by_their_scores(client):
    elements = [*NEW, *GIVEN]
    scores = np.array(client.post("/score", json={"elements": elements, "set": "machine"}).json()["scores"])
    found = client.post("/rank", json={"elements": elements, "set": "machine", "top": 5}).json()
    assert found["order"] == np.argsort(-scores, kind="stable")[:5].tolist()
    assert found["scores"] == sorted(scores, reverse=True)[:5]


def test_samples_match_the_library_for_a_seed(client, model):
    body = {"set": "machine", "samples": 3, "temperature": 0.5, "seed": 7}
    found = client.post("/sample", json=body).json()["samples"]
    generator = torch.Generator().manual_seed(7)
    expected = model.condition(as_array(GIVEN)).sample(3, generator=generator, temperature=0.5).x
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert client.post("/sample", json=body).json()["samples"] == found
    unseeded = {name: value for name, value in body.items() if name != "seed"}
    assert client.post("/sample", json=unseeded).json()["samples"] != found


def test_an_image_is_the_same_as_png_in_base64_and_as_pixels(client):
    given, new = images(3), images(1, seed=6)
    put(client, "a", [in_base64(one) for one in given], "images")
    put(client, "b", [one.tolist() for one in images(3, seed=8)], "images")
    forms = [
        in_base64(new[0]),
        "data:image/png;base64," + in_base64(new[0]),
        new[0].tolist(),
        [new[0].tolist()],
    ]
    scores = client.post("/score?model=images", json={"elements": forms, "set": "a"}).json()["scores"]
    body, kind = png(new[0]), {"Content-Type": "image/png"}
    alone = client.post("/score?model=images&set=a", content=body, headers=kind).json()["scores"]
    model = models()["images"].model
    expected = model.condition(torch.from_numpy(given).unsqueeze(1)).score(torch.from_numpy(new).unsqueeze(1))
    np.testing.assert_allclose([*scores, *alone], [expected.item()] * 5, rtol=1e-4, atol=1e-3)
    classes = client.post("/classify?model=images&set=a&set=b", content=body, headers=kind).json()
    assert classes["classes"] == ["a", "b"]
    assert sum(classes["probabilities"][0]) == pytest.approx(1)


def test_samples_of_images_are_pngs(client):
    body = {"samples": 3, "seed": 1}
    separate = client.post("/sample?model=images", json=body).json()["samples"]
    opened = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in separate]
    model = models()["images"].model
    expected = model.prior().sample(3, generator=torch.Generator().manual_seed(1)).images[:, 0]
    np.testing.assert_array_equal(opened, expected)
    sheet = client.post("/sample?model=images", json=body, headers={"Accept": "image/png"})
    assert sheet.headers["content-type"] == "image/png"
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(sheet.content))), np.concatenate(opened, 1)
    )


def test_given_images_are_dequantised_with_noise_to_sample(client):
    given = images(3)
    body = {"given": [in_base64(one) for one in given], "samples": 2, "seed": 1}
    separate = client.post("/sample?model=images", json=body).json()["samples"]
    found = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in separate]
    generator = torch.Generator().manual_seed(1)
    posterior = models()["images"].model.condition(torch.from_numpy(given).unsqueeze(1), generator)
    np.testing.assert_array_equal(found, posterior.sample(2, generator=generator).images[:, 0])


def test_a_picture_of_rows_is_refused(client):
    assert client.post("/sample", json={}, headers={"Accept": "image/png"}).status_code == 406


def test_several_models_are_side_by_side(client):
    found = client.get("/models").json()["models"]
    assert [(one["name"], one["kind"], one["shape"]) for one in found] == [
        ("rows", "rows", [4]),
        ("images", "images", [1, 6, 6]),
    ]
    assert client.get("/sets?model=rows").json()["ids"] == ["machine", "other"]
    assert client.get("/sets/machine?model=images").status_code == 404
    assert client.get("/sets?model=nothing").status_code == 404


@pytest.mark.slow
def test_calibrated_classes_have_the_p_values_and_the_temperature_of_the_library(monkeypatch):
    monkeypatch.setattr(Trained, "kept_calibration", lambda self: calibration())
    queries = rows(3, seed=9)
    sets = {"a": as_array(GIVEN), "b": as_array(NEW)}
    expected = trained().classify(as_array(queries), sets, none_rate=0.05)
    with served() as client:
        body = {"elements": queries, "support": {"a": GIVEN, "b": NEW}, "none_rate": 0.05}
        found = client.post("/classify", json=body).json()
    assert found["temperature"] == pytest.approx(expected.temperature)
    np.testing.assert_allclose(found["p"], expected.p, atol=1e-4)
    assert found["none_of_these"] == expected.none_of_these.tolist()


@pytest.mark.slow
def test_the_evidence_of_a_set_matches_its_elements_also_for_streams(tmp_path, model):
    with served(tmp_path) as client:
        put(client, "machine", GIVEN[:2])
        put(client, "machine", GIVEN[2:])
    with bruno.KeyedDetector(trained(), tmp_path / "rows.db", Detector(model, count_all=True)) as streams:
        found = streams.posterior("machine").evidence
    expected = Evidence.of(model.encode(as_array(GIVEN)).z)
    assert found.count == expected.count
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.scatter, expected.scatter, rtol=1e-4, atol=1e-4)
