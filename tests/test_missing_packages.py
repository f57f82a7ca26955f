"""Which errors are those of a package that is not installed."""

import sys

import pytest
from missing_packages import ROOT, missing_package


def error_of(name: str) -> ImportError:
    """What a module of the package raises if a package is missing."""
    try:
        try:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        except ModuleNotFoundError as error:
            raise ImportError(f"`bruno.ray` needs {name}.") from error
    except ImportError as error:
        return error


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Another environment than that of `make`."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))


@pytest.mark.usefixtures("elsewhere")
def test_an_optional_package_that_is_missing_is_the_cause_of_an_error():
    assert missing_package(error_of("ray.data")) == "ray"
    assert missing_package(error_of("opentelemetry.trace")) == "opentelemetry"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("error", [error_of("torch"), error_of("bruno.ray"), ImportError("ray"), None])
def test_other_errors_are_not_hidden(error):
    assert missing_package(error) is None


def test_nothing_is_hidden_in_the_environment_of_make(monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert missing_package(error_of("ray")) is None
