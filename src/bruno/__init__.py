"""BRUNO: exact, exchangeable deep models of sets."""

from bruno.process import Evidence, GaussianProcess, StudentTProcess

__all__ = ["Evidence", "GaussianProcess", "StudentTProcess"]
__version__ = "0.1.0"
