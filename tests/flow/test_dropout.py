"""Dropout in the networks of couplings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bruno.flow import ConvRealNVP, Dropout, set_dropout
from bruno.flow.dropout import random_mask

SEEDS = st.integers(0, 2**32 - 1)


def mask(seed: int, shape=(1000, 100), rate=0.3, part=0) -> torch.Tensor:
    return random_mask(torch.empty(shape), torch.tensor(seed), rate, part)


def flow_with_dropout(seed: int = 0) -> ConvRealNVP:
    torch.manual_seed(0)
    flow = ConvRealNVP((1, 8, 8), filters=4, blocks=1, dense_units=8)
    for p in flow.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    set_dropout(flow, 0.5, torch.Generator().manual_seed(seed))
    return flow


@settings(max_examples=20)
@given(SEEDS, st.floats(0.01, 0.99))
def test_numbers_are_dropped_at_the_given_rate_in_every_row_and_column(seed, rate):
    dropped = (~mask(seed, rate=rate)).double()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(float(dropped.mean()) - rate) < 6 * deviation / 1e5**0.5
    for axis, count in ((0, 1000), (1, 100)):
        assert float((dropped.mean(axis) - rate).abs().max()) < 7 * deviation / count**0.5 + 1 / count


@settings(max_examples=20)
@given(SEEDS, SEEDS)
def test_masks_of_two_seeds_are_unrelated(one, other):
    agreement = (mask(one, rate=0.5) == mask(other, rate=0.5)).double().mean()
    assert one == other or abs(float(agreement) - 0.5) < 6 * 0.5 / 1e5**0.5


def test_neighbours_are_dropped_independently():
    dropped = (~mask(7, (1_000_000,), rate=0.5)).double() - 0.5
    for lag in (1, 2, 3, 7, 8, 64, 196, 12544):
        assert abs(float((dropped[lag:] * dropped[:-lag]).mean())) < 6 * 0.25 / 1e6**0.5


def test_the_parts_of_a_batch_have_the_masks_of_the_whole_batch():
    whole = mask(3, (10, 6))
    assert torch.equal(torch.cat([mask(3, (5, 6), part=part) for part in (0, 1)]), whole)


def test_the_mean_of_a_number_is_kept():
    layer, x = Dropout(), torch.full((100_000,), 2.0)
    set_dropout(layer, 0.25, torch.Generator().manual_seed(0))
    y = layer(x)
    assert y.unique().tolist() == pytest.approx([0, 2 / 0.75])
    assert float(y.mean()) == pytest.approx(2, rel=0.01)


def test_dropout_is_off_until_it_is_turned_on():
    flow, x = flow_with_dropout(), torch.randn(3, 1, 8, 8)
    dropped = flow(x)[0]
    assert torch.equal(dropped, flow_with_dropout()(x)[0])
    assert not torch.equal(dropped, flow_with_dropout(seed=1)(x)[0])
    set_dropout(flow, 0.0)
    plain = flow(x)[0]
    assert not torch.equal(plain, dropped)
    torch.testing.assert_close(flow.inverse(plain)[0], x)
