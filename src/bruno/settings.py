"""Settings with a type, a description and a check: the fields of frozen attrs classes.

The classes of `bruno.config` consist of such settings. The checks run however a config is made: from TOML,
from a dictionary, or directly in Python.
"""

import ast
import difflib
import json
import sys
import tomllib
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import attrs

from bruno.checks import check_choice

T = TypeVar("T")
Field: TypeAlias = Any  # an attrs.Attribute, which cannot be subscripted at run time
Check = Callable[[str, Any], None]  # takes the name and the value of a setting

_NEAR = 0.65  # a known name is suggested if its likeness to the given one is at least this
# Settings of files written by version 0.1.
_RENAMED = {
    "train.length": "set_size",
    "train.rate": "learning_rate",
    "train.process_rate": "process_learning_rate",
    "train.final_rate": "final_learning_rate",
}
# Names that other libraries have for settings.
_ELSEWHERE = {"lr": "learning_rate", "batch_size": "batch", "epochs": "steps", "max_steps": "steps"}


def setting(default: Any, description: str, check: Check | None = None) -> Any:
    """A field of a config: its default, its description, and the check of its value."""

    def validate(config: Any, field: Field, value: Any) -> None:
        if check:
            check(_key(type(config), field.name), value)

    return attrs.field(default=default, validator=validate, metadata={"description": description})


def choice(description: str, *choices: str) -> Any:
    """A setting with a fixed choice of values; the first is the default."""
    words = " or ".join(f'"{choice}"' for choice in choices)
    return setting(choices[0], f"{description}: {words}", partial(check_choice, choices=choices))


def _key(cls: type, name: str) -> str:
    """The name of a setting in --set: ``flow.filters``; ``alpha`` in a class without a section."""
    section = getattr(cls, "SECTION", "")
    return f"{section}.{name}" if section else name


def typed(cls: type, fields: list[Field]) -> list[Field]:
    """Check the type of every setting before its value: a transformer of attrs."""
    convert = attrs.Converter(_converted, takes_self=True, takes_field=True)
    return [field.evolve(converter=convert) for field in fields]


def _converted(value: Any, config: Any, field: Field) -> Any:
    """A value of the type of a setting: dictionaries become configs, lists become tuples."""
    name, kind = _key(type(config), field.name), field.type
    if attrs.has(kind):
        return value if isinstance(value, kind) else from_dict(kind, _of_type(name, value, dict))
    if typing.get_origin(kind) is tuple:
        parts = _of_type(name, value, list, tuple)
        return tuple(_of_type(name, part, typing.get_args(kind)[0]) for part in parts)
    if kind is float:
        if not abs(_of_type(name, value, float, int)) <= sys.float_info.max:  # also rejects NaN
            raise ValueError(f"`{name}` must be a finite number; got {value}.")
        return float(value)
    return _of_type(name, value, kind)


def _of_type(name: str, value: Any, *types: type) -> Any:
    # In Python a bool is an int, but integer settings reject it.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names: dict[type, str] = {
            dict: "a section of settings",
            str: "a string",
            list: 'a list such as ["a", "b"] or [1, 2]',
        }
        wanted = " or ".join(names.get(kind, kind.__name__) for kind in types if kind is not tuple)
        raise ValueError(f"`{name}` must be {wanted}; got {value!r}.")
    return value


def describe(cls: Any) -> dict[str, str]:
    """The description of every setting, by its name in --set."""
    result: dict[str, str] = {}
    for field in attrs.fields(cls):
        nested: Any = field.type
        result |= (
            describe(nested) if attrs.has(nested) else {_key(cls, field.name): field.metadata["description"]}
        )
    return result


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Nested settings from ``section.key=value``; strings need no quotes.

    >>> parse_settings(["train.steps=50", "flow.kind=dense"])
    {'train': {'steps': 50}, 'flow': {'kind': 'dense'}}
    """
    nested: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, last = key.strip().split(".")
        section = nested
        for name in path:
            section = section.setdefault(name, {})
        if not equals or not last or len(path) > 1 or not isinstance(section, dict):
            raise ValueError(
                f"`settings` must be section.key=value, such as train.steps=500; got {setting!r}."
            )
        section[last] = _parsed_value(text.strip())
    return nested


def _parsed_value(text: str) -> Any:
    """A value as TOML or, failing that, as Python; any other text is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        pass
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return found if isinstance(found, bool | int | float | str | list) else text


def from_dict(cls: type[T], values: Any) -> T:
    """A config from nested dictionaries; the error for an unknown key names the nearest known ones."""
    if not isinstance(values, dict):
        raise ValueError(f"`{cls.__name__}` must be a table of settings; got {values!r:.80}.")
    _check_names(cls, values, tuple(describe(cls)))
    known, path = attrs.fields_dict(typing.cast(Any, cls)), _key(cls, "")
    arguments = {_current_name(path, key): value for key, value in values.items()}
    for name, field in known.items():
        if field.default is attrs.NOTHING and name not in arguments:
            raise ValueError(f"`{path}{name}` must be given: it has no default.")
    return cls(**arguments)


def _check_names(cls: type, values: dict[str, Any], every: Sequence[str]) -> None:
    """Raise ValueError unless all keys are settings; `every` has the names of all, over all sections."""
    known, path = attrs.fields_dict(typing.cast(Any, cls)), _key(cls, "")
    for key, value in values.items():
        name = _current_name(path, key)
        if name not in known:
            hint = _nearest_settings(path, name, sorted(known), every)
            raise ValueError(f"`{path}{name}` is not a setting of {cls.__name__}; {hint}")
        nested: Any = known[name].type
        if attrs.has(nested) and isinstance(value, dict):
            _check_names(nested, value, every)


def _current_name(path: str, key: Any) -> str:
    return str(_RENAMED.get(f"{path}{key}", key))


def _nearest_settings(path: str, name: str, known: Sequence[str], every: Sequence[str]) -> str:
    """A hint: the settings nearest to a name over all sections, or all of its own and the other sections.

    Of settings that are equally near, those of its own section win, and shorter names come first.
    """
    own, name = [f"{path}{one}" for one in known], _ELSEWHERE.get(name, name)
    near = {one: _likeness(name, one.rpartition(".")[2]) for one in (*own, *every)}
    most = max(near.values())
    if most < _NEAR:
        sections = {one.partition(".")[0] for one in every if "." in one}
        others = sorted(sections - {path.rstrip(".")}) if path else []
        end = f" Other sections are {', '.join(others)}." if others else ""
        return f"the settings are {', '.join(known)}.{end}"
    best = [one for one, likeness in near.items() if likeness == most]
    best = [one for one in best if one in own] or sorted(best, key=lambda one: one.count("."))
    return f"did you mean {' or '.join(f'`{one}`' for one in best)}?"


def _likeness(name: str, known: str) -> float:
    return difflib.SequenceMatcher(None, known, name).ratio()


def nearest(name: str, known: Iterable[str], all_are: str) -> str:
    """A hint: the nearest known name, or all of them after the words `all_are`."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"{all_are} {', '.join(known)}."


def to_dict(config: Any) -> dict[str, Any]:
    """The inverse of `from_dict`, ready for JSON."""
    return attrs.asdict(config)


def check_same(run: str, began: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise if a setting differs from the same setting of the run; settings that only one has are ignored."""
    before, after = flat(json.loads(json.dumps(began))), flat(json.loads(json.dumps(now)))
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            raise ValueError(
                f"`{key}` must be {before[key]}, as in the run {run}; got {after[key]}. "
                "Repeat its settings, or start another run."
            )


def flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with keys as in --set: ``flow.filters``."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return result
