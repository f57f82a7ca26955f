"""Run by test_processes.py in a separate process, without shape checks, which dynamo cannot trace.

Some of the cases are one for each process; all are each process with and without evidence.
"""

import sys

import torch

from bruno import Evidence, GaussianProcess, StudentTProcess


def compare(process, *evidence: Evidence) -> None:
    """Compare densities and gradients of a compiled process with those of the process itself."""
    z = torch.randn(3, 6, 4, dtype=torch.double, requires_grad=True)
    each = [one.unsqueeze() for one in evidence]
    for density, given in ((process.step_log_prob, evidence), (process.log_prob, each)):
        compiled = torch.compile(density, backend="aot_eager", fullgraph=True)
        expected, result = density(z, *given), compiled(z, *given)
        torch.testing.assert_close(result, expected)
        inputs = (z, *process.parameters())
        grads = torch.autograd.grad(expected.square().sum(), inputs)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), inputs), grads)


torch.manual_seed(0)
student, gaussian = StudentTProcess(4, dtype=torch.double), GaussianProcess(4, dtype=torch.double)
seen = Evidence.of(torch.randn(3, 2, 4))
compare(student, seen)
compare(gaussian)
if sys.argv[1] == "all":
    compare(student)
    compare(gaussian, seen)
