"""Decisions about columns on a log scale equal those about the logarithms of these columns."""

from typing import NamedTuple

import pytest
import torch
from tasks.machines import FLOW, PROCESS, machines
from torch.testing import assert_close

from bruno import Bruno, ModelConfig, checkpoint
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.streams.encoder import encoder_of
from bruno.tasks.anomaly import density_floor, judge_batch, reference_density
from bruno.tasks.attribution import unusual_column
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.classification import classify
from bruno.tasks.detector import Detector
from bruno.tasks.groups import Groups
from bruno.tasks.set_scores import SetScorer


class Version(NamedTuple):
    """A model of rows, and what it is asked about."""

    model: Bruno
    known: Examples
    calibration: GroupCalibration
    sets: torch.Tensor  # (sets, n, dim), the first row of each too low in a column


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def version(exponential: bool) -> Version:
    """Machines, or the exponentials of their numbers, which the model puts on log scales."""
    x = machines(60, 20, seed=1).elements
    x = 1.5 * (x - x.mean(0)) / x.std(0)
    sets = x[-200:].view(10, 20, -1).clone()
    sets[:, 0, 2] -= 4.0
    scales = "auto" if exponential else "linear"
    config = ModelConfig((x.shape[1],), 0, flow=FLOW, process=PROCESS, missing="impute", scales=scales)
    elements, sets = (x[:-200].exp(), sets.exp()) if exponential else (x[:-200], sets)
    known = Examples(elements, torch.arange(1000) // 20, tuple(map(str, range(50))))
    model = Bruno.from_config(config)
    model.initialise(known.elements)
    model.imputer.fit(model.preprocessing(known.elements)[0], known.labels)
    model.requires_grad_(False)
    sampler = SetSampler(known)
    floor = density_floor(model, sampler, generator=seeded())
    reference = reference_density(model, sampler, generator=seeded())
    groups = Groups.of(model, known, floor=floor, reference=reference, generator=seeded())
    cutoffs = fixed_cutoffs(model, groups)
    return Version(
        model, known, GroupCalibration(model, groups, cutoffs, floor, "", True, 0, reference), sets
    )


@pytest.fixture(scope="module")
def plain() -> Version:
    return version(exponential=False)


@pytest.fixture(scope="module")
def exponential() -> Version:
    found = version(exponential=True)
    assert set(found.model.preprocessing.kinds) == {"log"}
    return found


def test_latents_are_equal_and_log_dets_differ_by_a_constant(plain, exponential):
    (z, log_det), (other, of_other) = (
        one.model.encode(one.known.elements, on_scales=True) for one in (plain, exponential)
    )
    assert_close(z, other, rtol=1e-4, atol=1e-4)
    assert (log_det - of_other).std() < 1e-4
    assert exponential.model.encode(exponential.known.elements).log_det.std() > 1
    for on_scales in (False, True):
        fast = encoder_of(exponential.model, on_scales=on_scales)(exponential.known.elements.numpy())
        encoded = exponential.model.encode(exponential.known.elements, on_scales=on_scales)
        assert_close(torch.from_numpy(fast.log_det), encoded.log_det.double(), rtol=1e-4, atol=1e-4)


def test_batches_and_streams_are_judged_alike(plain, exponential):
    for one, other in zip(plain.sets, exponential.sets, strict=True):
        batch, of_other = (
            judge_batch(v.model, x, calibration=v.calibration, rate=0.05)
            for v, x in ((plain, one), (exponential, other))
        )
        assert [j.outlier for j in batch] == [j.outlier for j in of_other]
        assert_close([j.score for j in batch], [j.score for j in of_other], rtol=1e-3, atol=1e-3)
        stream, of_other = (
            list(Detector.calibrated(v.calibration, rate=0.05).watch(x))
            for v, x in ((plain, one), (exponential, other))
        )
        assert_close([j.score for j in stream], [j.score for j in of_other], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("criterion", ["score", "density"])
def test_sets_are_scored_alike(plain, exponential, criterion):
    scores = []
    for one in (plain, exponential):
        scorer = SetScorer.of(one.model, criterion)
        labels = torch.arange(200) // 20
        scored = scorer.score_sets(scorer.encode(one.sets.flatten(0, 1)), labels, 10)
        draws = scorer.draws(scored.evidence)
        scores.append((scored.scores - draws.mean(1)[labels], draws - draws.mean(1, keepdim=True)))
    assert_close(scores[0], scores[1], rtol=2e-3, atol=2e-3)


def test_low_numbers_are_named(plain, exponential):
    for one in (plain, exponential):
        named = [unusual_column(one.model.condition(x[1:]), x[0]).column for x in one.sets]
        assert named.count(2) >= 8


def test_a_missing_number_does_not_decide_for_the_class_of_smaller_numbers(exponential):
    level = torch.zeros(exponential.model.dim).double()
    level[1] = 1.5
    spread = 0.3 * torch.randn((40, exponential.model.dim), generator=seeded()).double()
    support = {"low": (spread[:15] - level).exp(), "high": (spread[15:30] + level).exp()}
    queries = spread[30:].exp()
    queries[:, 1] = torch.nan  # the only column that tells the classes apart
    found = classify(exponential.model, support, queries)
    assert (found.probabilities[:, 0] - 0.5).abs().mean() < 0.15
    assert (found.log_scores[:, 0] - found.log_scores[:, 1]).abs().mean() < 1


def test_a_calibration_of_other_densities_is_made_again(exponential, tmp_path):
    exponential.calibration.save(tmp_path / "new")
    assert GroupCalibration.load(tmp_path / "new", exponential.model).floor == exponential.calibration.floor
    tensors, header = checkpoint.read(tmp_path / "new", "cpu")
    del header["version"]
    checkpoint.write(tmp_path / "old", tensors, header)
    with pytest.raises(ValueError, match=r"got an older one\. Calibrate again"):
        GroupCalibration.load(tmp_path / "old", exponential.model)
