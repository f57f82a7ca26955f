"""Optional packages, and the extras of the package that install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = {"sklearn": "scikit-learn", "prometheus_client": "prometheus-client"}  # by the names of imports


class MissingPackageError(ImportError):
    """A package of an extra is not installed; the message names the extra."""


@contextmanager
def imports_of(extra: str, needed_for: str) -> Iterator[None]:
    """Imports of packages that an extra installs; if one is missing, the error says what it is needed for.

    >>> with imports_of("plots", "pictures"):
    ...     import a_missing_package
    Traceback (most recent call last):
    bruno.extras.MissingPackageError: pictures need a_missing_package: pip install 'bruno[plots]'
    """
    try:
        yield
    except ImportError as error:
        name = (error.name or str(error)).partition(".")[0]
        verb = "needs" if needed_for.startswith("`") else "need"
        text = f"{needed_for} {verb} {_PACKAGES.get(name, name)}: pip install 'bruno[{extra}]'"
        raise MissingPackageError(text, name=error.name) from error
