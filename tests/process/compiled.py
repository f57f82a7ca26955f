"""Run by test_processes.py in a separate process, without shape checks, which dynamo cannot trace."""

import torch

from bruno import Evidence, GaussianProcess, StudentTProcess

torch.manual_seed(0)
for process in (StudentTProcess(4, dtype=torch.double), GaussianProcess(4, dtype=torch.double)):
    z = torch.randn(3, 6, 4, dtype=torch.double, requires_grad=True)
    evidence = Evidence.of(torch.randn(3, 2, 4))
    for arguments in ((z,), (z, evidence)):
        compiled = torch.compile(process.step_log_prob, backend="aot_eager", fullgraph=True)
        expected, result = process.step_log_prob(*arguments), compiled(*arguments)
        torch.testing.assert_close(result, expected)
        inputs = (z, *process.parameters())
        grads = torch.autograd.grad(expected.square().sum(), inputs)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), inputs), grads)
