"""The function that opens a model, for the modules that `bruno.open` itself imports.

The package sets `opener` to `bruno.open`, which is imported at its first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

opener: Callable[..., Any]
