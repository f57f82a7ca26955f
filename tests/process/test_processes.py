import subprocess
import sys
from pathlib import Path

import pytest
import torch
from laws import PROCESSES, by_dimension, multivariate_log_prob, paper_recurrence, varied

from bruno import Evidence, GaussianProcess, StudentTProcess
from bruno.process.step_density import plain_step_log_prob

every_process = pytest.mark.parametrize("name", PROCESSES)


def vars_of(evidence: Evidence) -> tuple[torch.Tensor, ...]:
    return evidence.count, evidence.mean, evidence.scatter


def sets(*batch: int, n: int = 12, dim: int = 5) -> torch.Tensor:
    return 0.5 + torch.randn(*batch, n, dim, dtype=torch.double)


@every_process
class TestLaws:
    def test_order_does_not_matter(self, name):
        process, z = varied(name), sets(3)
        shuffled = z[:, torch.randperm(12)]
        torch.testing.assert_close(process.joint_log_prob(z), process.joint_log_prob(shuffled))
        total = process.step_log_prob(z).sum(-1)
        torch.testing.assert_close(total, process.step_log_prob(shuffled).sum(-1))

    def test_steps_multiply_to_the_joint_density(self, name):
        process, z = varied(name), sets(3)
        torch.testing.assert_close(process.step_log_prob(z).sum(-1), process.joint_log_prob(z))

    def test_joint_density_is_equation_4(self, name):
        process, z = varied(name), sets(3)
        torch.testing.assert_close(process.joint_log_prob(z), multivariate_log_prob(process, z))

    @pytest.mark.parametrize("n", [1, 2, 3, 4, 12, 50])
    def test_the_papers_recurrence_agrees(self, name, n):
        process, z = varied(name), sets(2, n=n)
        torch.testing.assert_close(process.step_log_prob(z), paper_recurrence(process, z))

    def test_predictive_of_each_prefix_agrees(self, name):
        process, z = varied(name), sets(3)
        prefixes = process.predictive(Evidence.prefixes(z))
        torch.testing.assert_close(prefixes.log_prob(z).sum(-1), process.step_log_prob(z))

    def test_a_set_can_be_continued(self, name):
        process, z = varied(name), sets(3)
        first = Evidence.of(z[:, :5])
        steps = process.step_log_prob(z)[:, 5:]
        torch.testing.assert_close(process.step_log_prob(z[:, 5:], first), steps)
        torch.testing.assert_close(process.joint_log_prob(z[:, 5:], first), steps.sum(-1))
        nothing = Evidence.empty(5)
        torch.testing.assert_close(process.step_log_prob(z, nothing), process.step_log_prob(z))

    def test_sets_of_different_sizes_are_continued_together(self, name):
        process, z = varied(name), sets(2)
        given = Evidence.of(z[0, :3]), Evidence.of(z[1, :7])
        both = Evidence(*(torch.stack([getattr(g, f) for g in given]) for f in ("count", "mean", "scatter")))
        more = sets(2, n=4)
        alone = [process.step_log_prob(more[i], given[i]) for i in range(2)]
        torch.testing.assert_close(process.step_log_prob(more, both), torch.stack(alone))

    def test_sets_of_different_sizes_are_continued_in_slices(self, name, monkeypatch):
        process, z = varied(name), sets(4, 3, n=2)
        given = Evidence.prefixes(sets(3))[:, [3, 1, 7]][0]
        together = process.step_log_prob(z, given)
        torch.testing.assert_close(together[:, 1], process.step_log_prob(z[:, 1], given[1]))
        monkeypatch.setattr("bruno.process.step_density._WIDE_NUMBERS", 1)
        torch.testing.assert_close(process.step_log_prob(z[0], given), together[0])

    def test_one_query_is_scored_under_many_sets(self, name):
        process, classes, query = varied(name), Evidence.of(sets(4)), sets(n=1)
        scores = process.step_log_prob(query, classes)
        assert scores.shape == (4, 1)
        torch.testing.assert_close(scores[2], process.step_log_prob(query, classes[2]))

    @pytest.mark.parametrize("n", [1, 2, 12])
    @pytest.mark.parametrize("given", [0, 3])
    def test_leave_one_out_equals_conditioning_on_the_others(self, name, n, given):
        process, z = varied(name), sets(2, n=n)
        before = sets(2, n=given) if given else None
        evidence = None if before is None else Evidence.of(before)
        for i in range(n):
            rest = torch.cat([x for x in (before, z[:, :i], z[:, i + 1 :]) if x is not None], 1)
            others = Evidence.of(rest) if rest.shape[1] else Evidence.empty(5, (2,))
            alone = process.predictive(others).log_prob(z[:, i]).sum(-1)
            torch.testing.assert_close(process.leave_one_out_log_prob(z, evidence)[:, i], alone)

    def test_an_outlier_costs_leave_one_out_no_precision(self, name):
        process = PROCESSES[name](1, correlation=0.9)
        z = torch.tensor([[0.1], [0.1001], [0.0999], [1e6]])
        exact = process.double().leave_one_out_log_prob(z.double())
        torch.testing.assert_close(
            process.float().leave_one_out_log_prob(z).double(), exact, rtol=1e-5, atol=1e-5
        )

    def test_only_the_chosen_dimensions_count(self, name):
        process, z = varied(name), sets(2)
        mask = process.correlated(0.4)
        assert 0 < mask.sum() < 5
        for method in ("step_log_prob", "log_prob", "joint_log_prob", "leave_one_out_log_prob"):
            terms = by_dimension(process, z, method)
            chosen = getattr(process, method)(z, dimensions=mask)
            torch.testing.assert_close(chosen, terms[..., mask].sum(-1))
            torch.testing.assert_close(getattr(process, method)(z), terms.sum(-1))

    @pytest.mark.parametrize("steps", [1, 2, 5, 12, 13])
    @pytest.mark.parametrize("given", [False, True])
    def test_long_sets_are_scored_in_blocks(self, name, steps, given, monkeypatch):
        process, z = varied(name), sets(3, 2, n=25).requires_grad_()
        earlier = sets(2, n=4).requires_grad_()

        def density_and_gradients():
            result = process.step_log_prob(z, Evidence.of(earlier) if given else None)
            weights = torch.linspace(-1, 2, result.numel(), dtype=torch.double).view(result.shape)
            inputs = (z, *process.parameters(), *([earlier] if given else []))
            return result, torch.autograd.grad((result * weights).sum(), inputs)

        whole = density_and_gradients()
        monkeypatch.setattr("bruno.process.step_density._MIN_STEPS_IN_A_BLOCK", steps)
        monkeypatch.setattr("bruno.process.step_density._NUMBERS_IN_A_BLOCK", 1)
        torch.testing.assert_close(density_and_gradients(), whole)

    @pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
    @pytest.mark.parametrize("given", ["nothing", "one count", "different counts"])
    def test_the_plain_formulas_agree(self, name, batch, given, monkeypatch):
        """Our backward pass against autograd's, for data, parameters and evidence."""
        process, z = varied(name), sets(*batch).requires_grad_()
        earlier = sets(*batch, n=4).requires_grad_()
        inputs = (z, *process.parameters(), *([] if given == "nothing" else [earlier]))

        def gradients():
            evidence = None if given == "nothing" else Evidence.of(earlier)
            if given == "different counts":
                evidence = Evidence(
                    torch.arange(evidence.count.numel()).view(batch) + 1, *vars_of(evidence)[1:]
                )
            result = process.step_log_prob(z, evidence)
            return result, torch.autograd.grad(result.square().sum(), inputs)

        written_out = gradients()
        monkeypatch.setattr("bruno.process.exchangeable.step_log_prob", plain_step_log_prob)
        torch.testing.assert_close(gradients(), written_out)


@every_process
class TestGradients:
    @pytest.mark.parametrize(
        "method", ["step_log_prob", "log_prob", "joint_log_prob", "leave_one_out_log_prob"]
    )
    @pytest.mark.parametrize("n", [1, 6])
    def test_of_data_and_parameters(self, name, method, n):
        process, z = varied(name, dim=3), sets(2, n=n, dim=3).requires_grad_()
        names, values = zip(*process.named_parameters(), strict=True)

        def density(z, *values):
            return torch.func.functional_call(process, dict(zip(names, values, strict=True)), (method, z))

        process.forward = lambda method, *args: getattr(process, method)(*args)
        assert torch.autograd.gradcheck(density, (z, *values))

    def test_of_evidence(self, name):
        process, z, earlier = varied(name, dim=3), sets(2, n=4, dim=3), sets(2, n=3, dim=3).requires_grad_()
        assert torch.autograd.gradcheck(lambda e: process.step_log_prob(z, Evidence.of(e)), earlier)
        assert torch.autograd.gradcheck(lambda e: process.log_prob(z, Evidence.of(e).unsqueeze()), earlier)

    @pytest.mark.parametrize("method", ["step_log_prob", "log_prob", "joint_log_prob"])
    def test_of_gradients(self, name, method):
        process, z = varied(name, dim=2), sets(2, n=3, dim=2).requires_grad_()
        assert torch.autograd.gradgradcheck(getattr(process, method), z)
        (grad,) = torch.autograd.grad(getattr(process, method)(z).sum(), z, create_graph=True)
        assert grad.requires_grad

    def test_a_second_backward_pass_gives_the_same_gradients(self, name):
        process, z = varied(name), sets(2).requires_grad_()
        loss = process.step_log_prob(z).square().sum()
        first = torch.autograd.grad(loss, z, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, z), first)

    def test_through_predictive_samples(self, name):
        process = varied(name)
        evidence = Evidence.of(sets())
        process.predictive(evidence).rsample(
            (3,), generator=torch.Generator().manual_seed(0)
        ).sum().backward()
        assert all(p.grad.isfinite().all() for p in process.parameters())


@every_process
class TestParameters:
    def test_start_at_the_given_values(self, name):
        process = PROCESSES[name](3, variance=[0.5, 1, 2], correlation=0.25, mean=0.1)
        torch.testing.assert_close(process.variance, torch.tensor([0.5, 1, 2]))
        torch.testing.assert_close(process.correlation, torch.full((3,), 0.25))
        torch.testing.assert_close(process.covariance, torch.tensor([0.125, 0.25, 0.5]))
        torch.testing.assert_close(process.residual_variance, torch.tensor([0.375, 0.75, 1.5]))
        torch.testing.assert_close(process.mean, torch.full((3,), 0.1))

    def test_the_mean_is_saved_and_not_trained(self, name):
        process = PROCESSES[name](2, mean=[1.0, 2.0])
        assert "mean" in process.state_dict()
        assert "mean" not in dict(process.named_parameters())
        other = PROCESSES[name](2)
        other.load_state_dict(process.state_dict())
        assert torch.equal(other.mean, process.mean)

    @pytest.mark.parametrize("far", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
    def test_are_valid_after_any_optimiser_step(self, name, far):
        process = PROCESSES[name](2)
        for parameter in process.parameters():
            parameter.data.fill_(far)
        assert ((process.variance > 0) & process.variance.isfinite()).all()
        assert ((process.correlation >= 0) & (process.correlation < 1)).all()
        assert (process.residual_variance > 0).all()
        if isinstance(process, StudentTProcess):
            assert ((process.dof > 2) & process.dof.isfinite()).all()
        z = torch.randn(3, 6, 2)
        for log_prob in (
            process.step_log_prob(z),
            process.joint_log_prob(z),
            process.leave_one_out_log_prob(z),
        ):
            assert not log_prob.isnan().any()
        sample = process.predictive(Evidence.of(z)).sample()
        assert sample.isfinite().all()

    @pytest.mark.slow
    def test_learn_from_data(self, name):
        """Sets with a strong common part raise the correlation; i.i.d. ones lower it."""
        process = PROCESSES[name](2, correlation=0.3)
        optimiser = torch.optim.Adam(process.parameters(), 0.05)
        for _ in range(150):
            common = torch.randn(64, 1, 2) * torch.tensor([1.0, 0.0])
            z = common + torch.randn(64, 8, 2) * torch.tensor([0.5, 1.0])
            optimiser.zero_grad()
            process.step_log_prob(z).mean().neg().backward()
            optimiser.step()
        assert process.correlation[0] > 0.7
        assert process.correlation[1] < 0.1


def test_defaults_are_those_of_the_paper():
    process = StudentTProcess(4)
    torch.testing.assert_close(process.dof, torch.full((4,), 1000.0))
    torch.testing.assert_close(process.variance, torch.ones(4))
    torch.testing.assert_close(process.correlation, torch.full((4,), 0.1))
    assert torch.equal(process.mean, torch.zeros(4))


def test_large_dof_approaches_the_gaussian_process():
    z = sets(3)
    gaussian = varied("gaussian").step_log_prob(z)
    errors = [
        (varied("student-t", dof=dof).step_log_prob(z) - gaussian).abs().max() for dof in (1e2, 1e4, 1e6)
    ]
    assert errors[2] < 1e-3
    assert errors[0] > 30 * errors[1] > 900 * errors[2]


def test_predictive_has_the_moments_of_the_formulas():
    process, z = varied("student-t"), sets()
    evidence = Evidence.of(z)
    nu, v, r, m = process.dof, process.variance, process.covariance, process.mean
    K = r[:, None, None] + (v - r)[:, None, None] * torch.eye(12, dtype=torch.double)
    weights = torch.linalg.solve(K, r[:, None].expand(5, 12).unsqueeze(-1)).squeeze(-1)
    centred = (z - m).T
    beta = (centred * torch.linalg.solve(K, centred.unsqueeze(-1)).squeeze(-1)).sum(-1)
    predictive = process.predictive(evidence)
    torch.testing.assert_close(predictive.mean, m + (weights * centred).sum(-1))
    variance = (nu + beta - 2) / (nu + 10) * (v - (weights * r[:, None]).sum(-1))
    torch.testing.assert_close(predictive.variance, variance)
    torch.testing.assert_close(predictive.df, nu + 12)


def test_samples_of_the_predictive_follow_it():
    process = StudentTProcess(1, dof=4.0, correlation=0.6)
    predictive = process.predictive(Evidence.of(torch.randn(5, 1)))
    sample = predictive.sample((20_000,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sample.mean(), predictive.mean.squeeze(), rtol=0, atol=0.03)
    torch.testing.assert_close(sample.var(), predictive.variance.squeeze(), rtol=0.05, atol=0)


@every_process
def test_half_precision_input_is_widened(name):
    process, z = PROCESSES[name](4), torch.randn(2, 6, 4).bfloat16()
    result = process.step_log_prob(z)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, process.step_log_prob(z.float()))


@every_process
def test_autocast_does_not_lower_the_precision(name):
    process, z = PROCESSES[name](50), torch.randn(2, 6, 50)
    expected = process.step_log_prob(z)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(process.step_log_prob(z), expected)


@pytest.mark.long
@pytest.mark.parametrize("cases", ["some", "all"])
def test_torch_compile_gives_the_same_result(cases):
    script = Path(__file__).with_name("compiled.py")
    subprocess.run([sys.executable, script, cases], check=True, capture_output=True, text=True)


@every_process
def test_arrays_and_lists_are_observations(name):
    process, z, mask = varied(name), sets(3), torch.tensor([True, False, True, True, False])
    for same in (z.numpy(), list(z.numpy()), z.tolist()):
        for density in ("step_log_prob", "log_prob", "joint_log_prob", "leave_one_out_log_prob"):
            ask = getattr(process, density)
            assert torch.equal(ask(same, dimensions=mask.numpy()), ask(z, dimensions=mask))


@every_process
@pytest.mark.usefixtures("without_shape_checks")
class TestMistakes:
    @pytest.mark.parametrize("wrong", ["z", {}, [None]], ids=lambda x: type(x).__name__)
    def test_a_wrong_type_is_a_type_error_that_names_the_argument(self, name, wrong):
        process, z = PROCESSES[name](3), torch.zeros(2, 3)
        for density in ("step_log_prob", "log_prob", "joint_log_prob", "leave_one_out_log_prob"):
            ask = getattr(process, density)
            with pytest.raises(TypeError, match="`z` must be a tensor, a numpy array"):
                ask(wrong)
            with pytest.raises(TypeError, match=r"`evidence` must be .*Evidence; got"):
                ask(z, wrong)
            with pytest.raises(TypeError, match="`dimensions` must be a tensor, a numpy array"):
                ask(z, dimensions=wrong)
        with pytest.raises(TypeError, match=r"`evidence` must be .*Evidence; got"):
            process.predictive(wrong)

    def test_wrong_dimensions_are_rejected(self, name):
        process = PROCESSES[name](3)
        for method in (process.step_log_prob, process.joint_log_prob, process.leave_one_out_log_prob):
            with pytest.raises(ValueError, match=r"`z` must have 3 dimensions last; got shape \(2, 4\)"):
                method(torch.zeros(2, 4))
            with pytest.raises(ValueError, match=r"`z` must have shape \(\*batch, n, dim\); got \(3,\)"):
                method(torch.zeros(3))
        with pytest.raises(ValueError, match="`evidence` must have 3 dimensions; got 4"):
            process.predictive(Evidence.empty(4))

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_infinity_are_rejected(self, name, bad):
        process, z = PROCESSES[name](3), torch.zeros(2, 4, 3)
        z[1, 2, 0] = bad
        for method in (process.step_log_prob, process.joint_log_prob, process.leave_one_out_log_prob):
            with pytest.raises(ValueError, match=rf"`z` must be finite; got {bad} at index \(1, 2, 0\)"):
                method(z)

    def test_empty_sets_integers_and_other_devices_are_rejected(self, name):
        process = PROCESSES[name](3)
        with pytest.raises(ValueError, match=r"at least one observation; got shape \(0, 3\)"):
            process.step_log_prob(torch.zeros(0, 3))
        with pytest.raises(TypeError, match=r"must be floating point; got torch.uint8"):
            process.step_log_prob(torch.zeros(2, 3, dtype=torch.uint8))
        with pytest.raises(ValueError, match="`z` must be on the same device as the rest, cpu; got meta"):
            process.step_log_prob(torch.zeros(2, 3, device="meta"))
        with pytest.raises(
            ValueError, match="`evidence` must be on the same device as the rest, cpu; got meta"
        ):
            process.predictive(Evidence.empty(3, device="meta"))

    @pytest.mark.parametrize("density", ["step_log_prob", "joint_log_prob", "leave_one_out_log_prob"])
    def test_evidence_of_another_batch_is_rejected(self, name, density):
        with pytest.raises(
            ValueError, match=r"`evidence` must have a batch that broadcasts with \(2,\).*got \(3,\)"
        ):
            getattr(PROCESSES[name](3), density)(torch.zeros(2, 4, 3), Evidence.of(torch.zeros(3, 2, 3)))

    def test_masks_of_another_type_or_shape_are_rejected(self, name):
        process = PROCESSES[name](3)
        for mask in (torch.ones(3), torch.ones(2, dtype=torch.bool)):
            with pytest.raises(ValueError, match=r"`dimensions` must be a bool mask of shape \(3,\)"):
                process.step_log_prob(torch.zeros(2, 3), dimensions=mask)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"variance": 0.0}, "`variance` must be from 1e-12 to 1e12; got 0"),
            ({"variance": 1e-20}, "`variance` must be from 1e-12 to 1e12; got 1e-20"),
            ({"correlation": 1.0}, "`correlation` must be from 0 to 0.9999997; got 1"),
            ({"correlation": 1 - 1e-9}, "`correlation` must be from 0 to 0.9999997; got 1"),
            ({"correlation": [0.1, -0.2, 0.1]}, "got -0.2"),
            ({"variance": [1.0, 2.0]}, r"one number or 3 of them; got shape \(2,\)"),
            ({"mean": torch.nan}, "`mean` must be finite"),
        ],
    )
    def test_parameters_out_of_range_are_rejected(self, name, arguments, message):
        with pytest.raises(ValueError, match=message):
            PROCESSES[name](3, **arguments)


def test_degrees_of_freedom_out_of_range_are_rejected():
    with pytest.raises(ValueError, match=r"`dof` must be above 2.0001 and at most 1e9; got 2"):
        StudentTProcess(3, dof=2.0)


@every_process
def test_a_float64_process_is_saved_and_copied(name):
    process = PROCESSES[name](3, dtype=torch.double, mean=0.5)
    other = PROCESSES[name](3, dtype=torch.double)
    other.load_state_dict(process.state_dict())
    assert torch.equal(other.mean, process.mean)
    mean = torch.ones(3, dtype=torch.double)
    own = PROCESSES[name](3, dtype=torch.double, mean=mean)
    mean.zero_()
    assert torch.equal(own.mean, torch.ones(3, dtype=torch.double))


@pytest.mark.slow
@every_process
def test_large_evidence_costs_the_joint_density_no_precision(name):
    process = PROCESSES[name](100)
    evidence, z = Evidence.of(torch.randn(100_000, 100)), torch.randn(5, 100)
    steps = process.step_log_prob(z, evidence).sum()
    torch.testing.assert_close(process.joint_log_prob(z, evidence), steps, rtol=1e-5, atol=0)


def test_a_process_needs_a_dimension():
    with pytest.raises(ValueError, match="`dim` must be at least 1; got 0"):
        GaussianProcess(0)


@every_process
def test_torch_func_transforms_give_the_same_result(name):
    process = varied(name)
    for density in (process.step_log_prob, process.log_prob):
        z = sets(3)
        plain = density(z)
        torch.testing.assert_close(torch.vmap(density)(z), plain)
        slope = torch.func.grad(lambda some, density=density: density(some).sum())(z)
        z.requires_grad_(True)
        torch.testing.assert_close(slope, torch.autograd.grad(density(z).sum(), z)[0])


@every_process
def test_single_elements_are_first_steps(name):
    process, z = varied(name), sets(3)
    torch.testing.assert_close(process.log_prob(z)[..., 0], process.step_log_prob(z)[..., 0])
    given = process.step_log_prob(z[:, 7:8], Evidence.of(z[:, :7]))
    torch.testing.assert_close(process.log_prob(z[:, 7], Evidence.of(z[:, :7])), given.squeeze(-1))


@every_process
@pytest.mark.parametrize("counts", ["one count", "different counts"])
@pytest.mark.parametrize(
    ("elements", "given"),
    [
        ((), ()),
        ((7,), ()),
        ((7, 1), (3,)),
        ((), (7,)),
        ((7,), (7,)),
        ((2, 7), (2, 1)),
        ((1, 7), (1, 1)),
        ((3, 1), (2, 1, 7)),
    ],
    ids=str,
)
def test_elements_are_scored_in_blocks(name, elements, given, counts, monkeypatch):
    process, z = varied(name), sets(n=21)[: max(1, torch.Size(elements).numel())].view(*elements, 5)
    evidence = Evidence.of(sets(*given, n=4))
    if counts == "different counts":
        count = 1 + torch.arange(evidence.count.numel()).view(given)
        evidence = Evidence(count, evidence.mean, evidence.scatter)
    steps = process.step_log_prob(z.unsqueeze(-2), evidence).squeeze(-1)
    torch.testing.assert_close(process.log_prob(z, evidence), steps)
    for numbers in (1, 60):
        monkeypatch.setattr("bruno.process.element_density._NUMBERS_IN_A_BLOCK", numbers)
        with torch.no_grad():
            torch.testing.assert_close(process.log_prob(z, evidence), steps.detach())


@every_process
def test_equal_elements_have_equal_densities_in_any_batch(name):
    process, element, evidence = PROCESSES[name](100), torch.randn(100), Evidence.of(torch.randn(5, 100))
    batch = process.log_prob(element.expand(33, 100), evidence)
    assert torch.equal(batch, process.log_prob(element, evidence).expand(33))
