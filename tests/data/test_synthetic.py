import numpy as np
import pytest
import torch

from bruno.data import load_examples
from bruno.data.synthetic import FAULTS, SENSORS, draw_characters, rasterise, simulate_machines


def test_drawings_of_a_character_differ():
    examples = draw_characters(5, 4, size=20)
    assert examples.elements.shape == (20, 1, 20, 20)
    assert examples.elements.dtype == torch.uint8
    assert examples.counts.tolist() == [4] * 5
    assert len({image.numpy().tobytes() for image in examples.elements}) == 20


def test_a_seed_determines_the_drawings():
    assert torch.equal(draw_characters(3, 2).elements, draw_characters(3, 2).elements)
    assert not torch.equal(draw_characters(3, 2).elements, draw_characters(3, 2, seed=1).elements)


@pytest.mark.slow
def test_every_drawing_has_bright_ink_away_from_the_border():
    x = draw_characters().elements.float() / 255
    ink = x.mean((1, 2, 3))
    assert ink.min() > 0.01
    assert ink.max() < 0.25
    border = x[..., 0].mean() + x[..., -1].mean() + x[..., 0, :].mean() + x[..., -1, :].mean()
    assert border < 0.02
    assert 0.18 < (x > 0).float().mean() < 0.22  # Omniglot: 18.6 to 20.0 %, depending on the split
    assert 0.07 < ink.mean() < 0.1


def test_drawings_are_closest_to_those_of_the_same_character():
    x = draw_characters(20, 10).elements.flatten(1).float().view(20, 10, -1)
    blurred = torch.nn.functional.avg_pool2d(x.view(200, 1, 28, 28), 4).flatten(1).view(20, 10, -1)
    within = torch.cdist(blurred, blurred).mean()
    means = blurred.mean(1)
    across = torch.cdist(blurred.flatten(0, 1), means).view(20, 10, 20)
    own = across.diagonal(dim1=0, dim2=2)
    assert (across.argmin(2) == torch.arange(20).unsqueeze(1)).float().mean() > 0.8
    assert own.mean() < within


@pytest.mark.slow
def test_drawn_is_a_named_dataset():
    assert len(load_examples("drawn", "all").names) == 40
    seen, unseen = (set(load_examples("drawn", split).names) for split in ("trainval", "test"))
    assert (len(seen), len(unseen)) == (36, 4)
    assert not seen & unseen


def test_a_long_line_has_the_width_of_the_pen_everywhere():
    line = rasterise([np.array([[0.1, 0.2], [0.9, 0.3]])], 105)
    assert (line[:, 20:85] > 0).sum(0).min() == 5  # no gaps between the dots


def deviations_of(rows: torch.Tensor) -> torch.Tensor:
    """Deviations from the mean of each machine, with the logarithm of vibration."""
    rows = torch.cat([rows[..., :-1], rows[..., -1:].log()], -1)
    return rows - rows.mean(1, keepdim=True)


def test_machines_share_the_correlations_between_sensors():
    examples, fault = simulate_machines(200, 50)
    assert examples.columns == SENSORS
    assert examples.counts.tolist() == [50] * 200
    assert not fault.any()
    deviations = deviations_of(examples.elements.view(200, 50, 8))
    first, second = (torch.corrcoef(half.reshape(-1, 8).T) for half in deviations.split(100))
    assert (first - second).abs().max() < 0.05
    assert first[0, 1] > 0.8  # heat and current follow the load


def test_vibration_is_log_normal():
    rows = simulate_machines(50, 200).examples.elements.view(50, 200, 8)[..., -1]
    assert (rows > 0).all()
    skewed, normal = (
        ((x - x.mean(1, keepdim=True)) ** 3).mean() / x.std(1).mean() ** 3 for x in (rows, rows.log())
    )
    assert skewed > 0.4
    assert abs(normal) < 0.1


def test_faults_are_labelled_and_leave_the_other_rows_unchanged():
    clean, faulty = simulate_machines(100, 40), simulate_machines(100, 40, fault_rate=0.1)
    counts = torch.bincount(faulty.fault, minlength=len(FAULTS)) / 4000
    assert counts[0] == pytest.approx(0.9, abs=0.02)
    assert (counts[1:] > 0.025).all()
    same = (clean.examples.elements == faulty.examples.elements).all(1)
    assert torch.equal(same, faulty.fault == 0)
    changed = (clean.examples.elements != faulty.examples.elements).sum(1)
    for name in ("spike", "broken correlation"):
        assert (changed[faulty.fault == FAULTS.index(name)] == 1).all()


def test_a_sensor_with_a_broken_correlation_stays_within_its_usual_range():
    clean, faulty = simulate_machines(100, 40), simulate_machines(100, 40, fault_rate=0.3)
    broken = (faulty.fault == FAULTS.index("broken correlation")).view(100, 40)
    usual = deviations_of(clean.examples.elements.view(100, 40, 8))
    changed = deviations_of(faulty.examples.elements.view(100, 40, 8))[broken]
    assert ((changed / usual.std((0, 1))).abs() < 4).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"fault_rate": 1.0}, r"`fault_rate` .*got 1\.0"), ({"machines": 1}, r"`machines` .*got 1")],
)
def test_impossible_machines_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        simulate_machines(**{"machines": 3, **settings})
