import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples
from bruno.tasks.anomaly_benchmark import BASELINES, area_and_precision, measure_anomaly


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_area_and_precision_are_scikit_learns_with_ties_and_weights():
    suspicion = torch.randint(6, (60,)).double()
    outlier = torch.rand(60) < 0.3
    weight = torch.randint(4, (5, 60)).double()
    area, precision = area_and_precision(suspicion, outlier, weight)
    for row, w in enumerate(weight):
        assert area[row].item() == pytest.approx(roc_auc_score(outlier, suspicion, sample_weight=w))
        expected = average_precision_score(outlier, suspicion, sample_weight=w)
        assert precision[row].item() == pytest.approx(expected)


def test_outliers_are_told_far_better_than_by_chance_and_than_in_latents_without_the_process(
    digits_model, learnt_digits
):
    (result,) = measure_anomaly(
        digits_model, learnt_digits, rates=(0.2,), set_size=20, sets=24, generator=seeded()
    )
    assert result.elements == 24 * 19
    assert 0.12 < result.outliers / result.elements < 0.28
    assert len(result.qualities) == 8
    online, finished = (result.qualities[f"BRUNO, {name}"] for name in ("online", "leave one out"))
    for quality in (online, finished):
        assert quality.area > 0.9
        assert quality.area_within > 0.9
        assert quality.average_precision > 0.75
        assert 0 < quality.area_error < 0.05
        assert 0 < quality.average_precision_error < 0.1
    for method, quality in result.qualities.items():
        assert quality.area > 0.6, method
        if "latents" in method:
            assert finished.area > quality.area + 0.05


def test_the_same_seed_gives_the_same_measurement(digits_model, unseen_digits):
    def measured(seed: int):
        return measure_anomaly(
            digits_model, unseen_digits, rates=(0.2,), set_size=6, sets=3, generator=seeded(seed)
        )

    assert measured(1) == measured(1)
    assert measured(1) != measured(2)


def test_rows_of_a_table_are_measured_like_images():
    labels = torch.arange(60) % 3
    rows = Examples(torch.randn(60, 4) + 8 * labels.unsqueeze(1), labels, ("a", "b", "c"))
    flow = FlowConfig(kind="dense", couplings=2, units=8)
    model = Bruno.from_config(ModelConfig((4,), 0, flow=flow, process=ProcessConfig(correlation=0.9)))
    model.initialise(rows.elements)
    (result,) = measure_anomaly(model, rows, rates=(0.1,), set_size=12, sets=6, generator=seeded())
    assert result.qualities["BRUNO, leave one out"].area > 0.95
    assert result.qualities["k-NN distance, columns"].area > 0.95


def test_the_others_are_the_same_without_some_baselines(digits_model, unseen_digits):
    def measured(baselines):
        return measure_anomaly(
            digits_model,
            unseen_digits,
            rates=(0.2, 0.3),
            set_size=6,
            sets=4,
            generator=seeded(),
            baselines=baselines,
        )

    every, distance, none = measured(BASELINES), measured(("k-NN distance",)), measured(())
    for some, left_out in ((distance, {"IsolationForest", "LocalOutlierFactor"}), (none, set(BASELINES))):
        for whole, part in zip(every, some, strict=True):
            kept = {m: q for m, q in whole.qualities.items() if m.split(",")[0] not in left_out}
            assert part.qualities == kept
    assert list(none[0].qualities) == ["BRUNO, online", "BRUNO, leave one out"]


def test_with_rotations_whole_sets_are_turned_each_its_own_way(digits_model, unseen_digits, monkeypatch):
    images = unseen_digits.elements
    known = [{image.numpy().tobytes() for image in torch.rot90(images, k, (-2, -1))} for k in range(4)]
    ways, encode = [], digits_model.encode

    def watched(x):
        for drawn in x:
            bytes_of = {image.numpy().tobytes() for image in drawn}
            ways.append([k for k in range(4) if bytes_of <= known[k]])
        return encode(x)

    monkeypatch.setattr(digits_model, "encode", watched)
    asked = {"rates": (0.3,), "set_size": 6, "sets": 40, "baselines": ()}
    measure_anomaly(digits_model, unseen_digits, **asked, generator=seeded())
    assert all(way == [0] for way in ways)
    ways.clear()
    measure_anomaly(digits_model, unseen_digits, **asked, rotations=True, generator=seeded())
    assert len(ways) == 40
    assert all(len(way) == 1 for way in ways)
    assert {way[0] for way in ways} == {0, 1, 2, 3}


def test_progress_goes_through_all_sets_of_all_rates(digits_model, unseen_digits):
    reports = []
    measure_anomaly(
        digits_model,
        unseen_digits,
        rates=(0.2, 0.3),
        set_size=6,
        sets=20,
        generator=seeded(),
        baselines=(),
        progress=lambda *report: reports.append(report),
    )
    assert reports == [(16, 40), (20, 40), (36, 40), (40, 40)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rates": (0.1, 0.0)}, r"`rates` must be between 0 and 1.*got 0\.0"),
        ({"warm_up": 6}, r"`warm_up` must be from 1 to below the `set_size` of 6; got 6"),
        ({"warm_up": 0}, r"`warm_up` must be from 1.*got 0"),
        ({"sets": 1}, r"`sets` must be at least 2.*got 1"),
        ({"rates": (1e-9,)}, r"`sets` must be so many that one has both.*none of 3 has"),
        ({"baselines": ("SVM",)}, r"`baselines` must be among 'IsolationForest'.*got 'SVM'"),
        ({"examples": Examples(torch.zeros(8, 3), torch.arange(8) % 2, ("a", "b"))}, r"`examples`.*\(3,\)"),
    ],
)
def test_what_cannot_be_measured(digits_model, unseen_digits, asked, message):
    with pytest.raises(ValueError, match=message):
        measure_anomaly(
            digits_model,
            **{"examples": unseen_digits, "set_size": 6, "sets": 3, "generator": seeded(), **asked},
        )
