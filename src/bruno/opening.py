"""How a model is opened from its source: the package sets it, for modules that opening is built on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

opener: Callable[..., Any]  # bruno.open, imported at its first call
