"""Every shape in a signature of the package is checked while the tests run, and only then."""

# ruff: noqa: E402, I001
import jaxtyping
import pytest
from hypothesis import settings

# Before any test imports the package; it stays for the whole session.
jaxtyping.install_import_hook("bruno", "typechecker.check").__enter__()

# Threads are told how to wait before torch starts them: beside other work on the same cores, a test that
# trains takes several times as long otherwise.
import bruno.threads  # noqa: F401
import torch

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def without_shape_checks(request):
    """For tests that hand over what the shapes forbid, to see the package's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
