import contextlib
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bruno import Evidence


def assert_same(a: Evidence, b: Evidence, tolerance: float = 1e-9) -> None:
    assert torch.equal(a.count, b.count)
    torch.testing.assert_close(a.mean, b.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.scatter, b.scatter, rtol=tolerance, atol=tolerance)


def observations(n: int = 9, dim: int = 3, batch: tuple[int, ...] = (), dtype=torch.double) -> torch.Tensor:
    return 4 + 2 * torch.randn(*batch, n, dim, dtype=dtype)


def test_is_count_mean_and_scatter():
    z = observations(batch=(2,))
    evidence = Evidence.of(z)
    assert evidence.count.tolist() == [9, 9]
    torch.testing.assert_close(evidence.mean, z.mean(-2))
    torch.testing.assert_close(evidence.scatter, z.var(-2, correction=0) * 9)


def test_order_does_not_matter():
    z = observations()
    assert_same(Evidence.of(z), Evidence.of(z[torch.randperm(9)]))


@given(st.data())
def test_grouping_does_not_matter(data):
    """Any tree of merges over any partition gives the evidence of the whole."""
    z = observations(n=data.draw(st.integers(1, 12)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(z) - 1)))) if len(z) > 1 else []
    parts = [Evidence.of(z[a:b]) for a, b in itertools.pairwise([0, *cuts, len(z)])]
    while len(parts) > 1:
        a = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        b = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(a + b)
    assert_same(parts[0], Evidence.of(z))


@given(st.data())
def test_removing_undoes_adding(data):
    """Removing elements in any grouping leaves the evidence of the rest."""
    z = observations(n=data.draw(st.integers(2, 12)))
    leave = data.draw(st.lists(st.integers(0, len(z) - 1), unique=True, max_size=len(z)))
    evidence = Evidence.of(z)
    while leave:
        size = data.draw(st.integers(1, len(leave)))
        group, leave = leave[:size], leave[size:]
        evidence = evidence.remove(z[group] if size > 1 else z[group[0]])
        z = z.index_fill(0, torch.tensor(group), torch.nan)
    rest = z[~z.isnan().any(-1)]
    assert_same(evidence, Evidence.of(rest) if len(rest) else Evidence.empty(3))


def test_each_element_that_is_inside_is_removed_alone():
    z, inside = observations(n=5), torch.tensor([True, True, False, True, True])
    others = Evidence.of(z[inside]).unsqueeze().without_each(z, inside)
    for i in range(5):
        assert_same(others[i], Evidence.of(z[inside & (torch.arange(5) != i)]))


def test_copies_of_an_element_have_no_scatter():
    z = observations(n=1)
    assert_same(Evidence.single(z[0], 3), Evidence.of(z.expand(3, -1)))


def test_adding_one_by_one_equals_adding_at_once():
    z = observations(batch=(2,))
    one_by_one = functools.reduce(Evidence.add, z.unbind(-2), Evidence.empty(3, (2,)))
    assert_same(one_by_one, Evidence.empty(3, (2,)).add(z))
    assert_same(one_by_one, Evidence.of(z))


def test_empty_is_neutral():
    evidence = Evidence.of(observations())
    nothing = Evidence.empty(3)
    assert_same(evidence + nothing, evidence, 0)
    assert_same(nothing + evidence, evidence, 0)
    assert_same(evidence - nothing, evidence, 0)
    assert_same(evidence - evidence, nothing, 0)


def test_each_prefix_is_the_evidence_of_the_elements_before():
    z = observations(batch=(2,))
    prefixes = Evidence.prefixes(z)
    assert prefixes.batch_shape == (2, 9)
    assert_same(prefixes[:, 0], Evidence.empty(3, (2,)))
    for n in range(1, 9):
        assert_same(prefixes[:, n], Evidence.of(z[:, :n]))


def test_an_outlier_does_not_affect_the_accuracy_of_the_prefix_before_it():
    z = torch.tensor([[1.0], [1.001], [1e8]])
    before = Evidence.prefixes(z)[2]
    torch.testing.assert_close(before.scatter, Evidence.of(z[:2]).scatter, rtol=1e-3, atol=0)


def test_a_large_offset_costs_no_precision():
    """The textbook Σz² − n·z̄² gives a negative scatter here."""
    z = observations(dtype=torch.float32) * 1e-3 + 1000
    exact = Evidence.of(z.double())
    by_ones = functools.reduce(Evidence.add, z, Evidence.empty(3))
    torch.testing.assert_close(Evidence.of(z).scatter, exact.scatter, rtol=1e-6, atol=0)
    torch.testing.assert_close(by_ones.scatter, exact.scatter, rtol=1e-6, atol=0)


def test_batches_broadcast_and_index():
    classes = Evidence.of(observations(batch=(4,)))
    common = Evidence.of(observations(n=2))
    merged = classes + common
    assert merged.batch_shape == (4,)
    assert_same(merged[2], classes[2] + common)
    assert_same(merged[1:3], classes[1:3] + common)
    assert classes[torch.tensor([0, 2])].batch_shape == (2,)


def test_sets_of_different_sizes_share_a_batch():
    a, b = observations(n=3), observations(n=5)
    joined = Evidence(
        *(torch.stack(pair) for pair in zip(*map(_fields, map(Evidence.of, (a, b))), strict=True))
    )
    more = observations(n=2, batch=(2,))
    assert_same(joined.add(more)[0], Evidence.of(torch.cat([a, more[0]])))
    assert_same(joined.add(more)[1], Evidence.of(torch.cat([b, more[1]])))


FIELDS = ("count", "mean", "scatter")


def _fields(evidence: Evidence) -> tuple[torch.Tensor, ...]:
    return evidence.count, evidence.mean, evidence.scatter


def test_may_be_given_as_arrays_lists_and_numbers():
    evidence = Evidence.of(observations())
    arrays = {name: part.numpy() for name, part in zip(FIELDS, _fields(evidence), strict=True)}
    lists = {name: part.tolist() for name, part in arrays.items()}
    for parts in (arrays, lists):
        for other in (Evidence(**parts), Evidence.checked(evidence.dim, **parts)):
            assert_same(other, evidence)
            assert_same(other + evidence, evidence + evidence)
            assert_same(other.to("cpu") - evidence, Evidence.empty(evidence.dim))
    assert_same(Evidence(2, [0, 1], [2, 4]) + Evidence.empty(2), Evidence.checked(2, 2, [0, 1], [2.0, 4.0]))
    with pytest.raises(TypeError, match=r"`mean` must .*got ndarray of <U1"):
        Evidence(np.array(2), np.array(["a"]), np.ones(1))


def test_converts_to_arrays():
    evidence = Evidence.of(observations(batch=(4,)))
    found = evidence.numpy()
    assert list(found) == list(FIELDS)
    assert all(isinstance(part, np.ndarray) for part in found.values())
    assert_same(Evidence(**found), evidence)


def test_is_immutable():
    evidence = Evidence.of(observations())
    with pytest.raises(AttributeError):
        evidence.count = torch.tensor(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_is_float64_for_data_of_any_type(dtype):
    z = observations().to(dtype)
    evidence = Evidence.of(z)
    assert evidence.mean.dtype == evidence.scatter.dtype == torch.float64
    torch.testing.assert_close(evidence.scatter, Evidence.of(z.double()).scatter, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 20, 1000])
def test_everything_can_be_removed_one_by_one(n):
    """In float32 the last ones would be rejected: rounding errors would exceed them."""
    z = observations(n=n, dim=20, dtype=torch.float32)
    evidence = Evidence.of(z)
    for i, x in enumerate(z[:-1], start=1):
        evidence = evidence.remove(x)
        if i == n - 2:
            assert_same(evidence, Evidence.of(z[-2:]), 1e-4)
    assert_same(evidence.remove(z[-1]), Evidence.empty(20), 0)


def test_removing_an_outlier_restores_the_rest():
    z = torch.randn(20, 3)
    z[0] = 1e5
    torch.testing.assert_close(
        Evidence.of(z).remove(z[0]).scatter, Evidence.of(z[1:]).scatter, rtol=1e-2, atol=0
    )


def test_a_set_around_zero_can_be_removed_after_encoding_it_again():
    z = torch.randn(200, 20, 3)
    z = z - z.mean(1, keepdim=True)
    again = z * (1 + 1e-7 * torch.randn_like(z))
    rest = Evidence.of(z) - Evidence.of(again)
    assert not rest.count.any()
    with pytest.raises(ValueError, match="got some that were not"):
        Evidence.of(z) - Evidence.of(z + 0.1)


def test_gradients_flow_through_adding_and_removing():
    z = observations(n=5).requires_grad_()

    def statistics(z):
        evidence = Evidence.of(z[:3]).add(z[3:]).remove(z[1])
        return evidence.mean, evidence.scatter

    assert torch.autograd.gradcheck(statistics, z)


def test_arrays_and_lists_are_observations():
    z = observations(batch=(2,))
    for same in (z.numpy(), z.numpy()[::-1][::-1], list(z), list(z.numpy()), z.tolist()):
        assert_same(Evidence.of(same), Evidence.of(z), 0)
        assert_same(Evidence.prefixes(same), Evidence.prefixes(z), 0)
        assert_same(Evidence.empty(3, (2,)).add(same), Evidence.of(z), 0)
        assert_same(Evidence.of(z).remove(same), Evidence.empty(3, (2,)), 0)


@pytest.mark.usefixtures("without_shape_checks")
class TestMistakes:
    @pytest.mark.parametrize("wrong", [None, "z", {}, [None]], ids=lambda x: type(x).__name__)
    def test_a_wrong_type_is_a_type_error_that_names_the_argument(self, wrong):
        evidence = Evidence.of(observations())
        for ask in (Evidence.of, Evidence.prefixes, evidence.add, evidence.remove):
            with pytest.raises(TypeError, match=r"`z` must be a tensor, a numpy array"):
                ask(wrong)
        with pytest.raises(TypeError, match=r"`other` must be .*Evidence; got"):
            evidence.merge(wrong)
        with pytest.raises(TypeError, match=r"`sets` must be .*Evidence; got"):
            Evidence.stack([evidence, wrong])

    def test_a_stack_of_no_sets_is_rejected(self):
        with pytest.raises(ValueError, match=r"`sets` must have .*at least one set; got none"):
            Evidence.stack([])

    def test_removing_more_than_was_added_is_rejected(self):
        with pytest.raises(ValueError, match=r"`z` .*at most 9 observations, .* added; got 10"):
            Evidence.of(observations()).remove(observations(n=10))
        with pytest.raises(ValueError, match=r"`other` .*at most 9 observations, .* added; got 10"):
            Evidence.of(observations()) - Evidence.of(observations(n=10))

    @pytest.mark.parametrize("left", [0, 1, 2, 5])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_removing_observations_that_were_never_added_is_rejected(self, left, dtype):
        z = observations(dtype=dtype)
        foreign = z[: 9 - left] + 30 * torch.randn(3, dtype=dtype)
        with pytest.raises(ValueError, match=r"`z` .*observations that were added before"):
            Evidence.of(z).remove(foreign)

    def test_a_wrong_number_of_dimensions_is_rejected(self):
        with pytest.raises(ValueError, match=r"several \(n, 3\).*got shape \(5, 4\)"):
            Evidence.of(observations()).add(torch.zeros(5, 4))
        with pytest.raises(ValueError, match=r"`other` must have 3 dimensions.*got 4"):
            Evidence.of(observations()).merge(Evidence.empty(4))

    def test_another_batch_is_rejected(self):
        for batch in ((), (3,), (2, 2)):
            with pytest.raises(ValueError, match=r"For another batch, merge with Evidence.of\(z\)"):
                Evidence.of(observations(batch=(2,))).add(observations(batch=batch))

    def test_nan_infinity_integers_and_empty_sets_are_rejected(self):
        z = observations()
        with pytest.raises(ValueError, match=r"`z` must be finite; got nan at index \(2, 1\)"):
            Evidence.of(z.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(torch.nan).double()))
        with pytest.raises(ValueError, match=r"got -?inf"):
            Evidence.of(z).add(z / 0)
        with pytest.raises(TypeError, match=r"floating point; got torch.int64. Use z.double\(\)"):
            Evidence.of(torch.ones(3, 2, dtype=torch.long))
        with pytest.raises(TypeError, match=r"floating point; got torch.int64. Use z.astype\(float\)"):
            Evidence.of(np.ones((3, 2), int))
        with pytest.raises(TypeError, match=r"floating point; got torch.bool.$"):
            Evidence.of([[True, False]])
        with pytest.raises(ValueError, match=r"at least one observation; got shape \(0, 3\)"):
            Evidence.of(torch.zeros(0, 3))

    def test_whole_numbers_of_a_list_are_real_numbers(self):
        evidence = Evidence.of([[1, 2], [3, 4]])
        assert evidence.mean.tolist() == [2.0, 3.0]
        assert evidence.add([5, 6]).mean.tolist() == [3.0, 4.0]

    def test_another_device_is_rejected(self):
        for ask in (Evidence.merge, Evidence.__sub__):
            with pytest.raises(ValueError, match=r"`other` must be on the same device .*cpu; got meta"):
                ask(Evidence.of(observations()), Evidence.empty(3, device="meta"))
        with pytest.raises(ValueError, match=r"`z` must be on the same device as the rest, cpu; got meta"):
            Evidence.of(observations()).add(torch.zeros(3, device="meta"))


def test_batches_can_be_stacked_and_reshaped():
    z = torch.randn(6, 4, 3)
    whole = Evidence.of(z)
    for same in (Evidence.stack([Evidence.of(one) for one in z]), whole.reshape(2, 3).reshape(-1)):
        for name in ("count", "mean", "scatter"):
            assert torch.equal(getattr(same, name), getattr(whole, name))
    assert whole.unsqueeze().batch_shape == (6, 1)


def test_removing_a_huge_observation_warns_that_digits_are_lost():
    z = torch.randn(5, 3, dtype=torch.double)
    for size, lost in ((1e3, False), (1e12, True)):
        huge = torch.full((3,), size, dtype=torch.double)
        grown = Evidence.of(z).add(huge)
        with pytest.warns(UserWarning, match=r"removing .* lost") if lost else contextlib.nullcontext():
            rest = grown.remove(huge)
        if not lost:
            torch.testing.assert_close(rest.scatter, Evidence.of(z).scatter, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 1.0], [1.7, 1.7, 1.7, 2.7], [1e-20, 2e-20, 3e-20]])
def test_removing_a_usual_observation_does_not_warn(values):
    z = torch.tensor(values, dtype=torch.double).unsqueeze(-1)
    assert Evidence.of(z).remove(z[-1]).count == len(values) - 1
