"""The exchangeable process: evidence of a set, and the exact distribution of its next element."""

from bruno.process.distributions import Normal, StudentT
from bruno.process.evidence import Evidence
from bruno.process.exchangeable import ExchangeableProcess
from bruno.process.processes import GaussianProcess, StudentTProcess
from bruno.threads import configure

__all__ = ["Evidence", "ExchangeableProcess", "GaussianProcess", "Normal", "StudentT", "StudentTProcess"]

configure()
