"""Single elements in numpy: they have the densities of the model, and streams the same judgements."""

import dataclasses

import numpy as np
import pytest
import torch
from streams.keyed import DIM, detector, machines, small_model, stream, trained

from bruno import Bruno, Evidence, FlowConfig, ModelConfig
from bruno.streams.fast_densities import FastDensities, densities_of
from bruno.tasks.stream_evidence import ElementDensities
from bruno.trained.watch import Judged

ROWS = torch.from_numpy(machines(1, 19, seed=7)[0])


@pytest.mark.parametrize("kind", ["student-t", "gaussian"])
@pytest.mark.parametrize("coupling", ["affine", "spline"])
def test_densities_of_an_element_match_the_model(coupling, kind):
    model = small_model(coupling, kind)
    fast, expected = densities_of(model), ElementDensities(model)
    assert isinstance(fast, FastDensities)
    latents = model.latents(ROWS)
    inside = torch.arange(19) % 3 > 0
    torch.testing.assert_close(
        fast.scores_of(latents)(inside).float(),
        expected.scores_of(latents)(inside).float(),
        rtol=1e-4,
        atol=1e-4,
    )
    for x, evidence in zip(
        ROWS, (Evidence.empty(DIM), Evidence.of(latents[:1]), Evidence.of(latents)), strict=False
    ):
        (z, log_det), wanted = fast.encode(x), expected.encode(x)
        assert z.dtype == wanted.z.dtype
        torch.testing.assert_close(z, wanted.z, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(log_det.float(), wanted.log_det, rtol=1e-5, atol=1e-5)
        for name, more in (("prior", ()), ("given", (evidence,))):
            found, value = (getattr(by, name)(z, *more) for by in (fast, expected))
            torch.testing.assert_close(found.float(), value.float(), rtol=1e-5, atol=1e-5)


def test_other_models_have_their_own_densities():
    config = ModelConfig(shape=(1, 2, 2), flow=FlowConfig(kind="dense", couplings=2, units=4))
    assert type(densities_of(Bruno.from_config(config))) is ElementDensities


@pytest.mark.parametrize("window", [None, 7, 19])
@pytest.mark.parametrize("count_all", [False, True])
def test_a_watched_stream_has_the_judgements_of_the_model(window, count_all):
    x = torch.from_numpy(stream(1, 60)[1])
    by_model = ElementDensities(trained().model)
    given = dataclasses.replace(detector(count_all), window=window, floor=-30.0)
    found, expected = (
        list(trained().watch(x, dataclasses.replace(given, densities=by))) for by in (None, by_model)
    )
    assert len(found) == len(expected) == 60
    assert 0 < sum(one.judgement.outlier for one in expected) < 30
    for name in ("seen", "outlier", "out_of_distribution", "basis"):
        assert _all(found, name) == _all(expected, name)
    for name in ("score", "p", "p_within", "threshold"):
        numbers, wanted = (np.array(_all(some, name), float) for some in (found, expected))
        np.testing.assert_allclose(numbers, wanted, rtol=1e-4, atol=1e-4)


def _all(judged: list[Judged], name: str) -> list[object]:
    return [getattr(one.judgement, name) for one in judged]
