"""Skips tests whose packages are not installed, except in the environment that `make` installs.

There, and so in CI, a missing package is an error: nothing is hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Imported only where they are used, by tests or by an extra; fastapi itself needs opentelemetry.
OPTIONAL = {"beartype", "fastapi", "httpx2", "onnxruntime", "opentelemetry", "playwright", "ray", "river"}


def missing_package(error: BaseException | None) -> str | None:
    """The optional package whose absence caused an error; None if that is not the cause."""
    if error is None or Path(sys.prefix) == ROOT / ".venv":
        return None
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return name if name in OPTIONAL else missing_package(error.__cause__)


def _skip_if_missing(error: BaseException, *, module: bool = False) -> None:
    if name := missing_package(error):
        pytest.skip(f"{name} is not installed", allow_module_level=module)


class _Module(pytest.Module):
    def collect(self) -> object:
        try:
            return super().collect()
        except self.CollectError as error:
            _skip_if_missing(error, module=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Collect a module, or skip it as a whole."""
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Run a test, or skip it."""
    try:
        return (yield)
    except ImportError as error:
        _skip_if_missing(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[None]:
    """Set up a fixture, or skip the tests that use it."""
    try:
        return (yield)
    except ImportError as error:
        _skip_if_missing(error)
        raise
