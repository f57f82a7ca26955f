"""`python -m bruno demo`: what the package can do so far."""

import sys

import torch

from bruno import Evidence, StudentTProcess


def demo() -> None:
    """A stream of measurements, each scored before it is learnt; the odd one out stands out."""
    print("BRUNO: the exchangeable process at work. (Training, images and the report come next.)\n")
    process = StudentTProcess(3, dof=10.0, correlation=0.8)
    generator = torch.Generator().manual_seed(0)
    stream = torch.tensor([1.0, -0.5, 0.3]) + 0.3 * torch.randn(10, 3, generator=generator)
    stream[7] += torch.tensor([-2.5, 2.0, -2.0])
    evidence = Evidence.empty(3)
    prior = process.predictive(evidence)
    print("element   log p(x | seen) − log p(x)")
    for i, x in enumerate(stream, start=1):
        score = (process.predictive(evidence).log_prob(x) - prior.log_prob(x)).sum().item()
        print(f"{i:7d}   {score:+7.2f}   {'odd one out' if score < 0 else ''}")
        if score >= 0:
            evidence = evidence.add(x)


if __name__ == "__main__":
    if sys.argv[1:] != ["demo"]:
        sys.exit("usage: python -m bruno demo")
    demo()
