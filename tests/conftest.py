"""Every shape in a signature of the package is checked while the tests run, and only then."""

# ruff: noqa: E402, I001
import os

import jaxtyping
import pytest
from hypothesis import settings

# Before any test imports the package; it stays for the whole session.
jaxtyping.install_import_hook("bruno", "typechecker.check").__enter__()

# Threads are told how to wait before torch starts them: beside other work on the same cores, a test that
# trains takes several times as long otherwise. Tests that run at the same time share the cores.
at_once = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
import bruno.threads  # noqa: F401
import torch

pytest_plugins = ["session_fixtures"]

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
