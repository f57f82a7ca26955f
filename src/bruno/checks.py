"""Checks of arguments and settings, with errors that name the argument, the rule and the value."""

import math
import operator
import sys
from collections import Counter
from collections.abc import Iterable

from bruno import limits

_MAX_LEVELS = 2**16


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless a setting is one of the choices."""
    if value not in choices:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, choices))}; got {value!r}.")


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise unless a number has at least this value."""
    try:
        enough = value >= least
    except TypeError:
        raise TypeError(f"`{name}` must be a number of at least {least}; got {value!r}.") from None
    if not enough:  # also rejects NaN
        raise ValueError(f"`{name}` must be at least {least}; got {value}.")


def check_real(name: str, value: float) -> None:
    """Raise unless the value is a number; infinity is one, NaN is not."""
    try:
        valid = not math.isnan(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a number; got {value!r}.") from None
    if not valid:
        raise ValueError(f"`{name}` must be a number; got {value}.")


def check_between(name: str, value: float, least: float, most: float) -> None:
    """Raise unless a number is from `least` to `most`."""
    check_at_least(name, value, least)
    if value > most:
        raise ValueError(f"`{name}` must be at most {most}; got {value}.")


def check_rate(name: str, rate: float) -> None:
    """Raise unless a rate is between 0 and 1, both excluded."""
    try:
        inside = 0 < rate < 1
    except TypeError:
        raise TypeError(f"`{name}` must be a number, such as 0.01 for one in 100; got {rate!r}.") from None
    if not inside:  # also rejects NaN
        raise ValueError(f"`{name}` must be between 0 and 1, such as 0.01 for one in 100; got {rate}.")


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Raise unless a number is whole and has at least this value; 2.0 is not whole."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a whole number; got {value!r}.") from None
    check_at_least(name, value, least)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise unless a number of things to draw or to measure is from `least` to `limits.COUNT`."""
    check_whole(name, value, least)
    limits.COUNT.check_argument(name, value, value)


def check_whole_numbers(name: str, values: object) -> None:
    """Raise unless these are a list, or another collection, of whole numbers."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"`{name}` must be a list of whole numbers; got {values!r}.")
    for value in values:
        check_whole(name, value, -sys.maxsize)


def check_all_differ(name: str, values: Iterable[object]) -> None:
    """Raise if a value occurs twice."""
    for value, count in Counter(values).items():
        if count > 1:
            raise ValueError(f"`{name}` must all differ; got {value!r} twice.")


def check_omitted(reason: str, **arguments: object) -> None:
    """Raise if any of these arguments is given: neither None nor False. `reason` says why it has no use."""
    given = [f"`{name}`" for name, value in arguments.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"{reason} omit {' and '.join(given)}.")


def check_levels(levels: int) -> None:
    """Raise unless images can have this number of grey values; 0 means rows of real numbers."""
    if levels == 1 or not 0 <= levels <= _MAX_LEVELS:
        raise ValueError(
            f"`levels` must be at least 2 and at most {_MAX_LEVELS}, or 0 for real numbers; got {levels}."
        )
