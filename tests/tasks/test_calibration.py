import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tasks.machines import latents_of, machine_model, machines, with_holes

from bruno.checkpoint import read, write
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.anomaly import density_floor, judge_batch, reference_density
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.groups import Groups
from bruno.tasks.robust_evidence import Cutoffs, batch_scores
from bruno.tasks.stream_evidence import stream_scores


@pytest.fixture(scope="module")
def model():
    return machine_model()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def calibrated(
    model, groups: int, rows: int = 20, seed: int = 1, floor: float = -math.inf, reference: float = -math.inf
) -> GroupCalibration:
    other = Groups.of(model, machines(40, rows, seed=50), generator=seeded())
    levels = {"floor": floor, "reference": reference}
    encoded = Groups.of(model, machines(groups, rows, seed=seed), **levels, generator=seeded())
    return GroupCalibration(
        model, encoded, fixed_cutoffs(model, other), floor, "machines", True, 0, reference
    )


@pytest.mark.slow
@pytest.mark.parametrize("calibrations", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("count_all", [False, True])
def test_false_alarms_of_new_machines_are_within_the_requested_rate(model, count_all, calibrations):
    """The model ignores the correlations of sensors; p-values hold nevertheless."""
    shares: dict[tuple[float, str], list[float]] = {}
    new = latents_of(model, machines(60, 20, seed=2))
    for seed in range(calibrations):
        found = calibrated(model, 60, seed=10 + seed)
        cutoffs = None if count_all else found.cutoffs
        stream, batch = found.stream(count_all=count_all), found.batch(20, count_all=count_all)
        for rate in (0.01, 0.05, 0.1):
            limits = torch.tensor([stream.threshold(n, rate) for n in range(1, 20)])
            alarms = stream_scores(model, new, cutoffs)[:, 1:] < limits
            shares.setdefault((rate, stream.basis(1, rate)), []).append(alarms.double().mean().item())
            alarms = batch_scores(model, new, cutoffs)[0] < batch.threshold(19, rate)
            shares.setdefault((rate, batch.basis(19, rate)), []).append(alarms.double().mean().item())
    assert [basis for _, basis in shares] == ["estimated", "exact", "exact"]
    for (rate, basis), found_rates in shares.items():
        assert np.mean(found_rates) < rate * (1.4 if basis == "exact" else 2)
        assert np.mean(found_rates) > rate * 0.4


def drifting(sets: int, seed: int) -> Examples:
    """Consecutive rows of machines whose levels change within each set."""
    clean = machines(sets, 20, seed=seed)
    slope = 5 * clean.elements.std(0) * torch.randn(sets, 1, clean.elements.shape[-1], generator=seeded(seed))
    drift = slope * torch.linspace(-1, 1, 20).unsqueeze(1)
    return Examples(clean.elements + drift.flatten(0, 1), clean.labels, clean.names)


@pytest.mark.slow
def test_consecutive_rows_are_calibrated_in_the_order_of_time(model):
    """The next row of a drifting machine is less likely given those before it than a random one."""
    data, shares = drifting(120, 1), {}
    reference = reference_density(model, SetSampler(data), generator=seeded())
    new = Groups.of(model, drifting(120, 2), ordered=True, reference=reference, generator=seeded())
    for ordered in (True, False):
        groups = Groups.of(model, data, ordered=ordered, reference=reference, generator=seeded())
        found = GroupCalibration(model, groups, fixed_cutoffs(model, groups), -math.inf, "", True)
        limits = torch.tensor([found.stream().threshold(n, 0.05) for n in range(1, 20)])
        z, less = new.latents.view(120, 20, -1), new.shortfall.view(120, 20)
        scores = stream_scores(model, z, found.cutoffs, less=less)
        shares[ordered] = (scores[:, 1:] < limits)[:, 9:].double().mean().item()
    assert 0.005 < shares[True] < 0.07
    assert shares[False] > 0.08


@pytest.mark.slow
def test_false_alarms_of_rows_with_missing_numbers_are_at_most_the_rate():
    """Imputed numbers are typical of the set: incomplete rows are flagged no more often than others."""
    model, size, sets = machine_model("impute"), 12, 40
    reference = reference_density(model, SetSampler(machines(40, size, seed=50)), generator=seeded())
    found = calibrated(model, 40, rows=size, reference=reference)
    batch, flagged = found.batch(size), {}
    for missing in (0.0, 0.3):
        x = with_holes(machines(sets, size, seed=2).elements.view(sets, size, -1), missing)
        judged = [judge_batch(model, model.impute(some), calibration=found, rate=0.1) for some in x]
        flagged[missing] = np.array([[one.p <= 0.1 for one in some] for some in judged]).mean(1)
    assert batch.basis(size - 1, 0.1) == "exact"
    assert flagged[0.0].mean() > 0.05
    for shares in flagged.values():
        assert shares.mean() < 0.1 + 3 * shares.std() / math.sqrt(sets)


def flagged_with_holes(found: GroupCalibration, x: torch.Tensor, rate: float) -> np.ndarray:
    """Which rows of sets (sets, n, dim) are flagged as batches, with missing numbers imputed."""
    model = found.model
    judged = [judge_batch(model, model.impute(some), calibration=found, rate=rate) for some in x]
    return np.array([[one.outlier for one in some] for some in judged])


@pytest.mark.slow
def test_rates_hold_for_complete_and_imputed_rows_of_groups_that_have_both():
    """Groups with missing numbers pass through the same imputation as a new set: p-values stay exact."""
    model, size, sets, rate = machine_model("impute"), 12, 80, 0.1

    def holed(count: int, seed: int) -> Examples:
        some = machines(count, size, seed=seed)
        return replace(some, elements=model.impute(with_holes(some.elements, 0.15, seed), some.labels))

    reference = reference_density(model, SetSampler(holed(40, 50)), generator=seeded())
    other = Groups.of(model, holed(40, 50), generator=seeded())
    groups = Groups.of(model, holed(60, 1), reference=reference, generator=seeded())
    cutoffs = fixed_cutoffs(model, other)
    found = GroupCalibration(model, groups, cutoffs, -math.inf, "machines", True, 0, reference)
    x = with_holes(machines(sets, size, seed=2).elements.view(sets, size, -1), 0.15)
    flagged, incomplete = flagged_with_holes(found, x, rate), x.isnan().any(-1).numpy()
    assert found.batch(size).basis(size - 1, rate) == "exact"
    assert 0.3 < incomplete.mean() < 0.9
    error = flagged.mean(1).std() / math.sqrt(sets)
    assert rate / 2 < flagged.mean() < rate + 3 * error
    assert flagged[incomplete].mean() < flagged[~incomplete].mean() + 3 * error


@pytest.mark.slow
def test_a_gross_fault_does_not_make_rows_with_missing_numbers_outliers():
    model, size, sets, rate = machine_model("impute"), 12, 40, 0.1
    found, raw = calibrated(model, 40, rows=size), machines(sets, size, seed=2).elements.view(sets, size, -1)
    x = with_holes(raw, 0.2)
    x[:, 0] = raw[:, 0]
    x[:, 0, 2] += 1000 * raw[..., 2].std()
    flagged = flagged_with_holes(found, x, rate)
    assert flagged[:, 0].all()
    shares = flagged[:, 1:].mean(1)
    assert shares.mean() < rate + 3 * shares.std() / math.sqrt(sets)


@pytest.mark.slow
def test_a_stream_imputes_missing_numbers_from_its_own_set():
    """As `Watch` does: the next row is completed given the rows that count, then judged."""
    model = machine_model("impute")
    found = calibrated(model, 40, rows=12)
    scores, new = found.stream(), machines(30, 12, seed=2).elements.view(30, 12, -1)
    alarms = []
    for rows in with_holes(new, 0.2):
        posterior = model.condition(model.impute(rows[:8]))
        completed = posterior.impute(rows[8:])
        assert not completed.isnan().any()
        alarms += [scores.p_value(score, 8, 0.1).p <= 0.1 for score in posterior.score(completed).tolist()]
    assert np.mean(alarms) < 0.15


@pytest.mark.slow
def test_thresholds_do_not_zigzag(model):
    stream = calibrated(model, 40, rows=30).stream()
    for rate in (0.01, 0.1):
        thresholds = np.array([stream.threshold(n, rate) for n in range(1, 25)])
        assert np.abs(np.diff(thresholds, 2)[4:]).max() < 0.5


def test_a_calibration_survives_a_file(model, tmp_path):
    found = calibrated(model, 12, reference=-15.0)
    found.save(tmp_path / "calibration.safetensors")
    loaded = GroupCalibration.load(tmp_path / "calibration.safetensors", model)
    assert (loaded.cutoffs, loaded.floor, loaded.unseen) == (found.cutoffs, found.floor, True)
    assert loaded.reference == -15.0
    assert torch.equal(loaded.stream().scores, found.stream().scores)
    assert loaded.batch(10).threshold(9, 0.2) == found.batch(10).threshold(9, 0.2)
    with pytest.raises(ValueError, match="of this model"):
        GroupCalibration.load(tmp_path / "calibration.safetensors", machine_model_of_another_scale())


def test_a_calibration_with_missing_numbers_survives_a_file(tmp_path):
    model, path = machine_model("impute"), tmp_path / "calibration.safetensors"
    some = machines(12, 8, seed=1)
    holed = replace(some, elements=with_holes(some.elements, 0.1))
    groups = Groups.of(model, holed, generator=seeded())
    found = GroupCalibration(model, groups, fixed_cutoffs(model, groups), -math.inf, "machines", True)
    found.save(path)
    loaded = GroupCalibration.load(path, model)
    assert loaded.stream().incomplete
    for count_all in (False, True):
        first, second = (one.stream(count_all=count_all).scores for one in (found, loaded))
        torch.testing.assert_close(first, second, equal_nan=True)
    torch.testing.assert_close(found.support().scores, loaded.support().scores, equal_nan=True)
    tensors, header = read(path, "cpu")
    write(path, {**tensors, "rows": tensors["rows"] / 0.0}, header)
    with pytest.raises(ValueError, match="`rows`"):
        GroupCalibration.load(path, model)
    del header["version"]  # as older versions, which imputed from whole groups
    write(path, tensors, header)
    with pytest.raises(ValueError, match="Calibrate again"):
        GroupCalibration.load(path, model)


def test_groups_without_complete_rows_are_judged_as_whole_sets(tmp_path):
    model, some = machine_model("impute"), machines(12, 8, seed=1)
    x = some.elements.clone()
    x[:, 0] = math.nan
    groups = Groups.of(model, replace(some, elements=x), generator=seeded())
    found = GroupCalibration(model, groups, fixed_cutoffs(model, groups), -math.inf, "machines", True)
    assert not found.stream().incomplete
    assert not found.stream().scores.isnan().any()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """The file of a calibration, for reading only."""
    path = tmp_path_factory.mktemp("saved") / "calibration.safetensors"
    calibrated(model, 4).save(path)
    return path


@pytest.mark.parametrize(
    ("part", "value", "name"),
    [
        ("names", ["a"], "`labels`"),
        ("names", None, "`names`"),
        ("cutoffs", [math.nan], "`cutoffs`"),
        ("tables", [["stream", 0, 0]], "`tables`"),
        ("seed", -1, "`seed`"),
        ("latents", torch.zeros(3, 1), "`latents`"),
        ("positions.0", torch.tensor([2, 1]), "`positions`"),
        ("scores.0", torch.zeros(1), "`scores`"),
        ("usable", None, "usable"),
    ],
)
def test_a_damaged_calibration_is_a_value_error_that_names_its_part(
    model, saved, tmp_path, part, value, name
):
    path = tmp_path / "calibration.safetensors"
    tensors, header = read(saved, "cpu")
    (header if part in header else tensors)[part] = value
    write(path, {key: tensor for key, tensor in tensors.items() if tensor is not None}, header)
    with pytest.raises(ValueError, match=rf"calibration.safetensors: .*{name}"):
        GroupCalibration.load(path, model)


def test_a_calibration_of_scores_alone_has_no_latents_and_p_values_that_are_never_lower(model, tmp_path):
    found = calibrated(model, 20, rows=6)
    found.of_scores_alone().save(tmp_path / "calibration.safetensors")
    alone = GroupCalibration.load(tmp_path / "calibration.safetensors", model)
    assert not len(alone.groups.latents)
    asked = np.linspace(-20, 5, 50)
    for count_all in (False, True):
        pairs = [
            (one.stream(count_all=count_all), one.batch(6, count_all=count_all)) for one in (found, alone)
        ]
        for position, (exact, rounded) in zip((3, 5), zip(*pairs, strict=True), strict=True):
            p, rounded_p = (one.p_values(asked, position, "exact") for one in (exact, rounded))
            assert (rounded_p >= p).all()
            np.testing.assert_allclose(rounded_p, p, atol=0.02)
    assert alone.batch(50) is alone.batch(6)


def machine_model_of_another_scale():
    model = machine_model()
    with torch.no_grad():
        model.process.raw_variance += 1
    return model


def test_batches_larger_than_most_groups_are_estimated(model):
    found = calibrated(model, 30)
    assert found.batch(20).basis(19, 0.1) == "exact"
    assert found.batch(50).basis(49, 0.1) == "estimated"
    assert found.batch(50) is found.batch(20)


def test_out_of_distribution_rows_of_groups_are_unusable(model):
    clean = machines(20, 15, seed=3)
    floor = density_floor(model, SetSampler(clean), generator=seeded())
    rows = clean.elements.clone()
    rows[7] = -999
    groups = Groups.of(model, Examples(rows, clean.labels, clean.names), floor=floor, generator=seeded())
    assert int((~groups.usable).sum()) == 1


def test_groups_that_are_all_out_of_distribution_are_an_error(model):
    """Thresholds of such groups would flag nothing, in streams and in batches."""
    groups = Groups.of(model, machines(4, 8, seed=1), floor=math.inf, generator=seeded())
    found = GroupCalibration(model, groups, Cutoffs((0.0,)), math.inf, "machines", True)
    for scores in (found.stream, lambda: found.batch(5)):
        with pytest.raises(ValueError, match=r"`data` .*all 32 are out-of-distribution"):
            scores()


def test_groups_of_different_sizes_support_the_positions_that_they_have(model):
    clean = machines(30, 20, seed=4)
    keep = (clean.labels < 20) | (torch.arange(600) % 20 < 6)  # ten groups of six
    groups = Groups.of(
        model, Examples(clean.elements[keep], clean.labels[keep], clean.names), generator=seeded()
    )
    stream = GroupCalibration(model, groups, fixed_cutoffs(model, groups), -math.inf, "", True).stream()
    assert (stream.groups_at(5), stream.groups_at(6), stream.groups_at(19)) == (30, 20, 20)


def test_groups_of_one_element_support_nothing(model):
    clean = machines(5, 1, seed=5)
    groups = Groups.of(model, clean, generator=seeded())
    with pytest.raises(ValueError, match=r"`groups` .*got 5"):
        fixed_cutoffs(model, groups)
