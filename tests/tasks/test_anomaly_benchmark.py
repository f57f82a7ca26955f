import pytest
import torch
from sklearn.covariance import LedoitWolf

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples
from bruno.tasks.anomaly_benchmark import BASELINES, _mahalanobis, measure_anomaly


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_model_detects_outliers_far_better_than_chance_and_baselines_on_latents(
    digits_model, learnt_digits
):
    (result,) = measure_anomaly(
        digits_model,
        learnt_digits,
        rates=(0.2,),
        set_size=20,
        sets=24,
        generator=seeded(),
        baselines=("LocalOutlierFactor", "k-NN distance", "Gaussian"),
    )
    assert result.elements == 24 * 19
    assert 0.12 < result.outliers / result.elements < 0.28
    assert len(result.qualities) == 8
    online, leave_one_out = (result.qualities[f"BRUNO, {name}"] for name in ("online", "leave one out"))
    for quality in (online, leave_one_out):
        assert quality.area > 0.9
        assert quality.area_within > 0.9
        assert quality.average_precision > 0.75
        assert 0 < quality.area_error < 0.05
        assert 0 < quality.average_precision_error < 0.1
    for method, quality in result.qualities.items():
        assert quality.area > 0.6, method
        if "latents" in method:
            assert leave_one_out.area > quality.area + 0.05


@pytest.mark.parametrize(("points", "dim"), [(20, 5), (12, 60)])
def test_the_gaussian_baseline_is_the_shrunk_mahalanobis_distance_of_scikit_learn(points, dim):
    x = torch.randn(points, dim, dtype=torch.double, generator=seeded()) * torch.linspace(0.1, 3, dim)
    expected = LedoitWolf().fit(x.numpy()).mahalanobis(x.numpy())
    assert _mahalanobis(x).numpy() == pytest.approx(expected, rel=1e-9)


def test_the_gaussian_baseline_takes_a_set_of_equal_points():
    assert _mahalanobis(torch.ones(4, 3, dtype=torch.double)).tolist() == [0.0] * 4


def test_isolation_forests_are_better_than_chance_and_worse_than_the_model(digits_model, learnt_digits):
    (result,) = measure_anomaly(
        digits_model,
        learnt_digits,
        rates=(0.2,),
        set_size=20,
        sets=5,  # each takes a second
        generator=seeded(),
        baselines=("IsolationForest",),
    )
    for space in ("pixels", "latents"):
        forest = result.qualities[f"IsolationForest, {space}"]
        assert 0.6 < forest.area < result.qualities["BRUNO, leave one out"].area


def test_the_same_seed_gives_the_same_result(digits_model, unseen_digits):
    def measured(seed: int):
        return measure_anomaly(
            digits_model,
            unseen_digits,
            rates=(0.3,),
            set_size=6,
            sets=2,
            generator=seeded(seed),
            baselines=("IsolationForest",),  # the only random baseline
        )

    first = measured(1)
    assert measured(1) == first
    assert measured(2) != first


def test_rows_of_a_table_are_measured_like_images():
    labels = torch.arange(60) % 3
    rows = Examples(torch.randn(60, 4) + 8 * labels.unsqueeze(1), labels, ("a", "b", "c"))
    flow = FlowConfig(kind="dense", couplings=2, units=8)
    model = Bruno.from_config(ModelConfig((4,), 0, flow=flow, process=ProcessConfig(correlation=0.9)))
    model.initialise(rows.elements)
    (result,) = measure_anomaly(
        model, rows, rates=(0.1,), set_size=12, sets=6, generator=seeded(), baselines=("k-NN distance",)
    )
    assert result.qualities["BRUNO, leave one out"].area > 0.95
    assert result.qualities["k-NN distance, columns"].area > 0.95


def test_baselines_do_not_change_the_other_results(digits_model, unseen_digits):
    def measured(baselines):
        return measure_anomaly(
            digits_model,
            unseen_digits,
            rates=(0.3, 0.3),
            set_size=6,
            sets=2,
            generator=seeded(),
            baselines=baselines,
        )

    every, distance, none = measured(BASELINES), measured(("k-NN distance",)), measured(())
    for some, left_out in ((distance, set(BASELINES) - {"k-NN distance"}), (none, set(BASELINES))):
        for whole, part in zip(every, some, strict=True):
            kept = {m: q for m, q in whole.qualities.items() if m.split(",")[0] not in left_out}
            assert part.qualities == kept
    assert list(none[0].qualities) == ["BRUNO, online", "BRUNO, leave one out"]


def test_with_rotations_all_elements_of_a_set_have_the_same_rotation(
    digits_model, unseen_digits, monkeypatch
):
    images = unseen_digits.elements
    known = [{image.numpy().tobytes() for image in torch.rot90(images, k, (-2, -1))} for k in range(4)]
    rotations, encode = [], digits_model.encode

    def watched(x):
        for drawn in x:
            bytes_of = {image.numpy().tobytes() for image in drawn}
            rotations.append([k for k in range(4) if bytes_of <= known[k]])
        return encode(x)

    monkeypatch.setitem(vars(digits_model), "encode", watched)
    settings = {"rates": (0.3,), "set_size": 6, "sets": 40, "baselines": ()}
    measure_anomaly(digits_model, unseen_digits, **settings, generator=seeded())
    assert all(found == [0] for found in rotations)
    rotations.clear()
    measure_anomaly(digits_model, unseen_digits, **settings, rotations=True, generator=seeded())
    assert len(rotations) == 40
    assert all(len(found) == 1 for found in rotations)
    assert {found[0] for found in rotations} == {0, 1, 2, 3}


def test_progress_counts_the_sets_of_all_rates(digits_model, unseen_digits):
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
    ("settings", "message"),
    [
        ({"rates": (0.1, 0.0)}, r"`rates` .*got 0\.0"),
        ({"warm_up": 6}, r"`warm_up` .*1 to 5.*got 6"),
        ({"warm_up": 0}, r"`warm_up` .*got 0"),
        ({"sets": 1}, r"`sets` .*2.*got 1"),
        ({"rates": (1e-9,), "baselines": ()}, r"`sets` .*got 3"),
        ({"baselines": ("SVM",)}, r"`baselines` .*'IsolationForest'.*got 'SVM'"),
        (
            {"examples": Examples(torch.zeros(8, 3), torch.arange(8) % 2, ("a", "b"))},
            r"`examples` .*\(1, 8, 8\); got \(3,\)",
        ),
    ],
)
def test_invalid_arguments_raise(digits_model, unseen_digits, settings, message):
    with pytest.raises(ValueError, match=message):
        measure_anomaly(
            digits_model,
            **{"examples": unseen_digits, "set_size": 6, "sets": 3, "generator": seeded(), **settings},
        )
