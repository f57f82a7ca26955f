import pytest
import torch
from tasks.machines import FLOW, PROCESS, machine_model, machines

from bruno import Bruno, ModelConfig
from bruno.data.synthetic import SENSORS
from bruno.tasks import unusual_column


@pytest.fixture(scope="module")
def model() -> Bruno:
    """A model without training that imputes missing numbers."""
    config = ModelConfig((len(SENSORS),), levels=0, flow=FLOW, process=PROCESS, missing="impute")
    examples = machines(40, 20, seed=100)
    model = Bruno.from_config(config)
    model.initialise(examples.elements)
    model.imputer.fit(model.preprocessing(examples.elements)[0], examples.labels)
    return model.requires_grad_(False)


@pytest.mark.parametrize("sensor", range(len(SENSORS) - 1))
def test_the_column_of_a_spike_is_named_with_its_value_and_mean(model, sensor):
    rows = machines(2, 21, seed=sensor).elements[:21].clone()
    clean, spread = rows[20, sensor].item(), rows[:20, sensor].std().item()
    rows[20, sensor] += 8 * spread
    found = unusual_column(model.condition(rows[:20]), rows[20])
    assert found.column == sensor
    assert found.value == pytest.approx(rows[20, sensor].item())
    assert abs(found.expected - clean) < 2.5 * spread
    assert found.gain > 0


@pytest.mark.parametrize("seen", [0, 20])
def test_an_extreme_number_is_named_if_the_means_of_other_columns_overflow(seen):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((400, 2), generator=generator).double()
    rows = torch.stack([rows.sum(1), (3 + rows[:, 0]).exp()], 1)
    model = Bruno.from_config(
        ModelConfig((2,), levels=0, flow=FLOW, process=PROCESS, missing="impute", scales="auto")
    )
    model.initialise(rows)
    model.imputer.fit(model.preprocessing(rows)[0], torch.arange(20).repeat_interleave(20))
    found = unusual_column(model.condition(rows[:20]) if seen else model.prior(), [99999.0, 20.0])
    assert (found.column, found.value) == (0, 99999.0)
    assert abs(found.expected) < 10


def test_a_row_may_be_an_array_or_a_list(model):
    rows = machines(2, 21, seed=0).elements[:21].clone()
    posterior = model.condition(rows[:20])
    expected = unusual_column(posterior, rows[20])
    for row in (rows[20].numpy(), rows[20].tolist()):
        assert unusual_column(posterior, row) == expected
    assert unusual_column(posterior, [1] * len(SENSORS)) == unusual_column(posterior, [1.0] * len(SENSORS))
    with pytest.raises(ValueError, match=r"`x` must be one row .*got shape \(1, "):
        unusual_column(posterior, rows[20:].numpy())


def test_a_model_that_does_not_impute_names_no_column():
    rows = machines(2, 20, seed=0).elements[:20]
    model = machine_model()
    assert unusual_column(model.condition(rows), torch.zeros(len(SENSORS)).double()) is None
