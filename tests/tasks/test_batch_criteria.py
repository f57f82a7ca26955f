import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bruno import Bruno
from bruno.checkpoint import read, write
from bruno.config import FlowConfig, ModelConfig
from bruno.data.synthetic_tiles import simulate_tiles
from bruno.reporting.summaries import summarise
from bruno.tasks import batch_criteria
from bruno.tasks.anomaly import judge_batch
from bruno.tasks.batch_criteria import PatchGrid, SetScale, patch_maps, patch_scores
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.groups import Groups
from bruno.tasks.metrics import roc_auc
from bruno.tasks.planted_outliers import OUTLIERS, measure_planted_outliers
from bruno.tasks.robust_evidence import batch_scores
from bruno.trained import Trained

SIZE, TILES = 8, 10


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model() -> Bruno:
    """An untrained model of tiles: p-values hold for any model."""
    flow = FlowConfig(kind="dense", couplings=2, units=8)
    torch.manual_seed(0)
    return Bruno.from_config(ModelConfig(shape=(3, SIZE, SIZE), flow=flow))


def tiles(classes: int, seed: int, defects: int = 0):
    return simulate_tiles(classes, TILES, size=SIZE, defects=defects, seed=seed)


def calibrated(model: Bruno, criterion, classes: int = 30) -> GroupCalibration:
    cutoffs = fixed_cutoffs(model, Groups.of(model, tiles(8, 1).examples, generator=seeded()))
    keep = criterion == "patches"
    groups = Groups.of(model, tiles(classes, 2).examples, generator=seeded(), keep_images=keep)
    return GroupCalibration(model, groups, cutoffs, -math.inf, "tiles", True, criterion=criterion)


def sets_of(classes: int, seed: int, defects: int = 0) -> torch.Tensor:
    elements = tiles(classes, seed, defects).examples.elements
    return elements.view(classes, TILES, 3, SIZE, SIZE)


def judged(model, calibration: GroupCalibration, x: torch.Tensor, **options):
    return judge_batch(model, x, calibration=calibration, **options)


def test_standardised_scores_do_not_change_if_the_scores_of_a_class_are_multiplied():
    scores = torch.randn(3, 9, generator=seeded()) * 50 + 400
    first, scaled = (SetScale.of(s).standardised(s) for s in (scores, 7 * scores))
    assert torch.allclose(first, scaled)


def test_a_score_of_zero_is_standardised_to_minus_one_in_a_set_with_high_scores():
    scores = torch.tensor([[100.0, 101.0, 99.0, 102.0, 0.0]])
    scale = SetScale.of(scores)
    assert scale.standardised(scores)[0, -1].item() == -1
    assert scale.in_nats(-1.0) == 0


@pytest.mark.parametrize("criterion", ["score", "patches"])
def test_false_alarms_of_new_classes_are_within_an_exact_rate(model, criterion):
    calibration = calibrated(model, criterion)
    flagged = [[one.outlier for one in judged(model, calibration, x, rate=0.1)] for x in sets_of(40, seed=3)]
    shares = torch.tensor(flagged).double().mean(1)
    assert calibration.batch(TILES).basis(TILES - 1, 0.1) == "exact"
    assert shares.mean() <= 0.1 + 3 * shares.std() / math.sqrt(len(shares))


@pytest.mark.parametrize("criterion", ["score", "patches"])
def test_outliers_are_those_with_a_score_below_the_threshold(model, criterion):
    calibration = calibrated(model, criterion)
    found = judged(model, calibration, sets_of(1, seed=4, defects=4)[0], rate=0.1)
    assert [one.outlier for one in found] == [one.score < one.threshold for one in found]


def test_scores_and_thresholds_of_images_are_in_nats(model):
    calibration, x = calibrated(model, "score"), sets_of(1, seed=4)[0]
    scores = batch_scores(model, model.latents(x), calibration.cutoffs)[0]
    assert torch.allclose(torch.tensor([one.score for one in judged(model, calibration, x)]), scores)


def test_patches_find_the_defects_of_tiles():
    found, defect = simulate_tiles(8, 16, defects=4, seed=5)
    scores = patch_scores(found.elements.view(8, 16, 3, 32, 32))
    assert roc_auc(defect > 0, -scores.flatten().double()) > 0.9
    assert torch.allclose(scores.quantile(0.5, dim=1), torch.full((8,), -1.0))


def test_two_defects_that_are_alike_do_not_hide_each_other():
    x = torch.zeros(8, 1, 16, 16) + 10 * torch.rand(8, 1, 16, 16, generator=seeded())
    x[:2, :, 4:8, 4:8] = 200
    assert sorted(patch_scores(x).argsort()[:2].tolist()) == [0, 1]


def test_a_map_is_lowest_where_the_defect_is():
    x = torch.zeros(8, 1, 32, 32) + 10 * torch.rand(8, 1, 32, 32, generator=seeded())
    x[2, :, 8:16, 20:28] = 200
    maps, grid = patch_maps(x), PatchGrid.of(32, 32)
    assert (grid.size, grid.step, maps.shape[1:]) == ((8, 8), (2, 2), grid.places)
    assert divmod(int(maps[2].argmin()), grid.places[1]) == (8 // 2, 20 // 2)
    torch.testing.assert_close(maps.flatten(1).amin(1), patch_scores(x), rtol=0, atol=0)


def test_the_patches_that_judged_a_set_are_reported(model):
    x = sets_of(1, seed=4, defects=4)[0]
    found = judged(model, calibrated(model, "patches"), x)
    scores = torch.tensor([one.score for one in found])
    assert torch.equal(found.patches.flatten(1).amin(1), scores)
    assert judged(model, calibrated(model, "score"), x).patches is None


def test_outliers_are_explained_by_the_patches_that_judged_them(model, monkeypatch):
    calibration = calibrated(model, "patches")
    monkeypatch.setattr(Trained, "calibration", lambda self, *_, **__: calibration)
    x = sets_of(1, seed=4, defects=4)[0]
    found = Trained(model, None, Path("nowhere")).judge_batch(x, rate=0.3, explain=True)
    outliers = found.outliers.elements
    assert outliers
    assert found.explanation.names == tuple(one.name for one in outliers)
    assert found.explanation.scores.tolist() == [one.judgement.score for one in outliers]
    for one in outliers:
        assert min(one.judgement.contributions.values()) == one.judgement.score
    assert "in nats" not in summarise(found.explanation).note
    by_score = replace(calibration, criterion="score", _kept={})
    monkeypatch.setattr(Trained, "calibration", lambda self, *_, **__: by_score)
    found = Trained(model, None, Path("nowhere")).judge_batch(x, rate=0.3, explain=True)
    scores = torch.tensor([one.judgement.score for one in found.outliers.elements])
    torch.testing.assert_close(found.explanation.scores.float(), scores, rtol=1e-4, atol=1e-2)


def test_a_patch_may_be_shifted_by_a_step():
    x = torch.zeros(6, 1, 16, 16)
    x[:, :, 4:8, 4:8] = 100
    x[0, :, 4:8, 4:8], x[0, :, 5:9, 3:7] = 0, 100
    assert patch_scores(x)[0] == 0


def test_patches_of_a_single_image_cannot_be_compared():
    with pytest.raises(ValueError, match=r"`x` .*at least 2 images.*got \(1, 1, 8, 8\)"):
        patch_scores(torch.rand(1, 1, 8, 8))


def test_a_large_set_is_compared_with_some_of_its_images(monkeypatch):
    monkeypatch.setattr(batch_criteria, "_MAX_OTHERS", 7)
    x = torch.rand(40, 1, 8, 8, generator=seeded()) * 20
    x[11] = 255
    assert patch_scores(x).argmin() == 11


def test_identical_images_have_equal_scores():
    assert patch_scores(torch.full((2, 5, 1, 8, 8), 7.0)).unique().tolist() == [0]


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> tuple[GroupCalibration, Path]:
    calibration, folder = calibrated(model, "patches", classes=4), tmp_path_factory.mktemp("calibration")
    calibration.batch(TILES)
    calibration.by_score().batch(TILES)
    calibration.save(folder / "calibration.safetensors")
    return calibration, folder / "calibration.safetensors"


def test_a_calibration_of_images_survives_a_file(model, saved):
    calibration, path = saved
    again = GroupCalibration.load(path, model)
    assert again.criterion == "patches"
    again = replace(again, _kept={})
    assert torch.equal(again.batch(TILES).scores, calibration.batch(TILES).scores)
    both = (one.by_score().batch(TILES).scores for one in (again, calibration))
    assert torch.allclose(*both, rtol=1e-4)


@pytest.mark.parametrize(
    ("part", "value"),
    [("criterion", "pixels"), ("criterion", None), ("images", torch.zeros(40, 3, 2, 2)), ("images", None)],
)
def test_a_damaged_or_old_calibration_of_images_is_refused(model, saved, part, value, tmp_path):
    """Before scores of images were standardised, calibrations had no criterion."""
    tensors, header = read(saved[1], "cpu")
    values = header if part == "criterion" else tensors
    values[part] = value
    if value is None:
        del values[part]
    write(tmp_path / "damaged.safetensors", tensors, header)
    with pytest.raises(ValueError, match="version" if (part, value) == ("criterion", None) else part):
        GroupCalibration.load(tmp_path / "damaged.safetensors", model)


def test_an_untrained_model_is_worse_than_patches_at_planted_outliers(model):
    calibration = calibrated(model, "score", classes=6)
    found = measure_planted_outliers(
        model, calibration.cutoffs, tiles(6, 7).examples, images=200, generator=seeded()
    )
    assert found.criterion == "patches"
    assert set(found.model) == set(found.baseline) == set(OUTLIERS)
    assert found.baseline["patch of another class"] > 0.8


def test_planted_outliers_need_two_classes(model):
    calibration = calibrated(model, "score", classes=6)
    with pytest.raises(ValueError, match=r"two classes.*got 1 of 10"):
        measure_planted_outliers(
            model, calibration.cutoffs, tiles(1, 7).examples, images=200, generator=seeded()
        )
