"""Every shape in a signature of the package is checked while the tests run, and only then."""

import jaxtyping
import pytest
import torch
from hypothesis import settings

# Before any test imports the package; it stays for the whole session.
jaxtyping.install_import_hook("bruno", "typechecker.check").__enter__()

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
