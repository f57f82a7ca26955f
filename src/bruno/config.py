"""A model and its training as data: frozen attrs classes, from and to dictionaries and TOML.

Every setting carries its description and its checks. They hold however a config is made: from TOML, from a
dictionary, or directly in Python.
"""

import difflib
import json
import math
import operator
import sys
import tomllib
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import attrs

from bruno import limits

T = TypeVar("T")
Field: TypeAlias = Any  # an attrs.Attribute, which cannot be subscripted at run time
Check = Callable[[str, Any], None]  # takes the name and the value of a setting

_PRESETS = Path(__file__).parent / "presets"
# Upper limits of settings, far above any use: a larger value would exhaust memory or never end.
_MOST_COUPLINGS = 1000
_MOST_BLOCKS = 100
_MOST_UNITS = 2**16
_MOST_ELEMENTS = 2**20
_MOST_STEPS = 10**9
_MOST_PIXELS = 10_000  # height or width of an image
_MOST_LEVELS = 2**16
_LARGEST = 1e9  # any other number

_RENAMED = {"train.length": "set_size"}  # settings of files written by version 0.1


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


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Raise unless a number is whole and has at least this value; 2.0 is not whole."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a whole number; got {value!r}.") from None
    check_at_least(name, value, least)


def check_levels(levels: int) -> None:
    """Raise unless images can have this number of grey values; 0 stands for rows of real numbers."""
    if levels == 1 or not 0 <= levels <= _MOST_LEVELS:
        raise ValueError(
            f"`levels` must be at least 2 and at most {_MOST_LEVELS}, or 0 for real numbers; got {levels}."
        )


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise unless a number of things to draw or to measure is from `least` to `limits.COUNT`."""
    check_whole(name, value, least)
    limits.COUNT.check_argument(name, value, value)


def _setting(default: Any, description: str, check: Check | None = None) -> Any:
    """A field of a config: its default, its description, and the check of its value."""

    def validate(config: Any, field: Field, value: Any) -> None:
        if check:
            check(_key(type(config), field.name), value)

    return attrs.field(default=default, validator=validate, metadata={"description": description})


def _choice(description: str, *choices: str) -> Any:
    """A setting with a fixed choice of values; the first is the default."""
    words = " or ".join(f'"{choice}"' for choice in choices)
    return _setting(choices[0], f"{description}: {words}", partial(check_choice, choices=choices))


def _check_between(name: str, value: float, least: float, most: float) -> None:
    check_at_least(name, value, least)
    if value > most:
        raise ValueError(f"`{name}` must be at most {most}; got {value}.")


def _from(least: float, most: float) -> Check:
    return partial(_check_between, least=least, most=most)


def _check_range(name: str, value: float, rule: str, holds: Callable[[float], bool]) -> None:
    if not holds(value):
        raise ValueError(f"`{name}` must be {rule}; got {value}.")


_UP_TO_ONE = partial(_check_range, rule="from 0 up to 1", holds=lambda value: 0 <= value < 1)
_TO_ONE = partial(_check_range, rule="from 0 to 1", holds=lambda value: 0 <= value <= 1)
_ABOVE_ZERO = partial(
    _check_range, rule=f"above 0 and at most {_LARGEST:g}", holds=lambda value: 0 < value <= _LARGEST
)
_DOF = partial(
    _check_range, rule=f"above 2 and at most {_LARGEST:g}", holds=lambda value: 2 < value <= _LARGEST
)
_ALPHA = partial(_check_range, rule="between 0 and 0.5", holds=lambda value: 0 < value < 0.5)
_BINS = partial(_check_range, rule="from 2 to 128", holds=lambda value: 2 <= value <= 128)
_SEED = partial(_check_range, rule="from 0 to 2**63 - 1", holds=lambda value: 0 <= value < 2**63)


def _key(cls: type, name: str) -> str:
    """The name of a setting in --set: ``flow.filters``."""
    return name if cls in (ModelConfig, Recipe) else f"{cls.__name__.removesuffix('Config').lower()}.{name}"


def _typed(cls: type, fields: list[Field]) -> list[Field]:
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
            dict: "a table",
            str: "a string",
            list: 'a list such as ["a", "b"] or [1, 2]',
        }
        wanted = " or ".join(names.get(kind, kind.__name__) for kind in types if kind is not tuple)
        raise ValueError(f"`{name}` must be {wanted}; got {value!r}.")
    return value


@attrs.frozen(slots=False, field_transformer=_typed)
class FlowConfig:
    """The bijection between elements and latents: "conv" for images, "dense" for rows and small images."""

    kind: str = _choice("couplings", "conv", "dense")
    scales: int = _setting(2, "scales of the convolutional couplings, each half as large", _from(1, 16))
    depth: int = _setting(
        3, "couplings of each kind in a scale; the last scale has one more", _from(1, _MOST_BLOCKS)
    )
    mixing: bool = _setting(False, "mix channels by learnt 1 × 1 convolutions between couplings")
    filters: int = _setting(64, "filters of a convolution", _from(1, _MOST_UNITS))
    blocks: int = _setting(8, "residual blocks of a convolutional coupling", _from(0, _MOST_BLOCKS))
    squeeze_first: bool = _setting(False, "run the first couplings at half the resolution, which is faster")
    couplings: int = _setting(
        6, "dense couplings; after the convolutional ones, if any", _from(0, _MOST_COUPLINGS)
    )
    units: int = _setting(1024, "hidden units of a dense coupling", _from(1, _MOST_UNITS))
    weight_norm: bool = _setting(True, "normalise the weights and initialise their scale from data")
    coupling: str = _choice("map of a coupling; a spline is followed by an affine map", "affine", "spline")
    spline_scales: int = _setting(0, "number of scales with splines, from the first; 0: all", _from(0, 16))
    spline_dense: bool = _setting(False, "also use splines in the dense couplings after convolutional ones")
    bins: int = _setting(8, "bins of a spline", _BINS)
    interval: float = _setting(5.0, "a spline is the identity outside [-interval, interval]", _ABOVE_ZERO)

    def __attrs_post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.spline_scales > self.scales:
            raise ValueError(
                f"`flow.spline_scales` must be at most the {self.scales} scales, or 0 for all; "
                f"got {self.spline_scales}."
            )


@attrs.frozen(slots=False, field_transformer=_typed)
class ProcessConfig:
    """The exchangeable process of the latents, and the initial values of its parameters."""

    kind: str = _choice("process", "student-t", "gaussian")
    dof: float = _setting(1000.0, "initial degrees of freedom", _DOF)
    variance: float = _setting(1.0, "initial variance of a latent", _ABOVE_ZERO)
    correlation: float = _setting(0.1, "initial correlation of two elements of a set", _UP_TO_ONE)
    leading: int = _setting(
        0, "number of leading dimensions: they start at another correlation", _from(0, sys.maxsize)
    )
    leading_correlation: float = _setting(0.9, "initial correlation of the leading dimensions", _UP_TO_ONE)


@attrs.frozen(slots=False, field_transformer=_typed)
class ModelConfig:
    """A model of sets whose elements have this shape."""

    shape: tuple[int, ...] = _setting(attrs.NOTHING, "shape of an element: (1, 28, 28) or (7,)")
    levels: int = _setting(256, "values that a pixel can take; 0 for rows of real numbers")
    pixels: str = _choice("map of pixels to real numbers", "logit", "gaussianise")
    alpha: float = _setting(1e-6, "margin of that map at both ends, as a fraction of its range", _ALPHA)
    flow: FlowConfig = attrs.field(factory=FlowConfig)
    process: ProcessConfig = attrs.field(factory=ProcessConfig)
    missing: str = _choice("missing numbers of rows", "reject", "impute")
    scales: str = _choice("scales of columns: standardised, or chosen for each", "linear", "auto")

    def __attrs_post_init__(self) -> None:
        """Check the settings without a range."""
        if self.levels and self.missing != "reject":
            raise ValueError(f"`missing` must be 'reject' for images; got {self.missing!r}.")
        if not self.shape or any(size < 1 for size in self.shape):
            raise ValueError(f"`shape` must be positive sizes such as (1, 28, 28) or (7,); got {self.shape}.")
        limits.MEMORY.check_argument("shape", self.shape, 4 * math.prod(self.shape))
        check_levels(self.levels)


@attrs.frozen(slots=False, field_transformer=_typed)
class TrainConfig:
    """How a model is trained: on sets of one class, on few-shot episodes, or on a weighted sum of both.

    Schedules depend on the fraction of the run that is done, so that a run limited by minutes has the same
    shape as one limited by steps.
    """

    steps: int = _setting(1000, "optimiser steps", _from(1, _MOST_STEPS))
    minutes: float = _setting(
        0.0, "train for this long instead of `steps`; 0: by steps", _from(0, _MOST_STEPS)
    )
    batch: int = _setting(32, "sets per step", _from(1, _MOST_ELEMENTS))
    set_size: int = _setting(20, "set size: elements per set", _from(1, _MOST_ELEMENTS))
    generative: float = _setting(1.0, "weight of bits/dim in the loss", _from(0, _LARGEST))
    discriminative: float = _setting(
        0.0, "weight of the episodes' cross-entropy in the loss", _from(0, _LARGEST)
    )
    onset: float = _setting(0.0, "fraction of the run before cross-entropy starts", _UP_TO_ONE)
    episodes: int = _setting(8, "few-shot episodes per step", _from(1, _MOST_ELEMENTS))
    way: int = _setting(20, "classes per episode", _from(2, _MOST_ELEMENTS))
    shot: int = _setting(1, "support elements of each class of an episode", _from(1, _MOST_ELEMENTS))
    queries: int = _setting(1, "query elements of each class of an episode", _from(1, _MOST_ELEMENTS))
    shared: bool = _setting(False, "compute bits/dim on the episodes' elements instead of on separate sets")
    optimiser: str = _choice("optimiser", "adamw", "adam", "rmsprop")
    rate: float = _setting(1e-3, "learning rate of the flow", _from(0, _LARGEST))
    process_rate: float = _setting(
        3.0, "learning rate of the process, as a multiple of `rate`", _from(0, _LARGEST)
    )
    weight_decay: float = _setting(0.0, "weight decay of the flow", _from(0, _LARGEST))
    warmup: float = _setting(0.02, "fraction of the run in which the learning rate warms up", _UP_TO_ONE)
    decay: str = _choice("schedule of the learning rate", "linear", "cosine", "exponential", "none")
    final_rate: float = _setting(0.0, "final learning rate, as a fraction of `rate`", _UP_TO_ONE)
    clip: float = _setting(0.0, "gradient clipping: largest norm; 0: none", _from(0, _LARGEST))
    ema: float = _setting(0.0, "decay of the moving average of the weights; 0: none", _UP_TO_ONE)
    mirror: bool = _setting(False, "mirror every second set as a whole")
    shift: int = _setting(0, "shift each image by up to this many pixels", _from(0, _MOST_PIXELS))
    slant: float = _setting(0.0, "initial strength of random linear maps of whole sets", _from(0, _LARGEST))
    warp: float = _setting(0.0, "initial strength of random linear maps of single images", _from(0, _LARGEST))
    restyle: float = _setting(
        0.0, "initial fraction of images with another pen, filter and contrast; needs data.original", _TO_ONE
    )
    fade: float = _setting(
        1.0, "last fraction of the run, in which shift, slant, warp and restyle fade; 0: never", _TO_ONE
    )
    precision: str = _choice("type of the networks on a GPU", "bfloat16", "float32")
    graph: bool = _setting(True, "on a GPU, compile the step and capture it as one CUDA graph")
    recompute: bool = _setting(False, "activation checkpointing: less memory for more time")
    seed: int = _setting(0, "seed of all random numbers", _SEED)

    def __attrs_post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.onset and not self.generative:
            raise ValueError(
                f"`train.onset` needs `train.generative` above 0, as the loss before it; got {self.onset}."
            )
        if not self.generative and not self.discriminative:
            raise ValueError("`train.generative` or `train.discriminative` must be above 0; got 0 for both.")
        if self.shared and not (self.generative and self.discriminative):
            raise ValueError("`train.shared` needs weights above 0 for both losses; one of them is 0.")
        if self.decay == "exponential" and not self.final_rate:
            raise ValueError("`train.final_rate` must be above 0 for an exponential decay; got 0.")

    @property
    def min_count(self) -> int:
        """Number of elements that every class must have."""
        sets = self.set_size * bool(self.generative and not self.shared)
        return max(1, sets, (self.shot + self.queries) * bool(self.discriminative))

    @property
    def elements(self) -> int:
        """Number of elements encoded in a step."""
        sets = self.batch * self.set_size * bool(self.generative and not self.shared)
        return sets + self.episodes * self.way * (self.shot + self.queries) * bool(self.discriminative)


@attrs.frozen(slots=False, field_transformer=_typed)
class DataConfig:
    """The data that a model learns from."""

    name: str = _setting(attrs.NOTHING, "a named dataset, or the path of a folder, archive, npz or table")
    split: str = _choice("split to train on", "train", "trainval")
    rotations: bool = _setting(False, "use every class four times, rotated by multiples of 90 degrees")
    original: bool = _setting(False, "augment images at their original size and downsample them last")
    classes: tuple[str, ...] = _setting((), "use only these classes; empty: all")
    size: int = _setting(
        0, "user images: resize to this height and width; 0: do not resize", _from(0, _MOST_PIXELS)
    )
    colour: bool = _setting(False, "user images: three channels instead of one")
    invert: bool = _setting(False, "user images: turn dark ink on bright paper into bright ink")
    # Recipes of older files do not have this setting; that of Omniglot is true.
    drawings: bool = _setting(
        attrs.Factory(lambda data: data.name == "omniglot", takes_self=True),
        "user images: normalise polarity, frame, pen and sharpness of line drawings",
    )
    group: str = _setting("", "table: the group column, which names the set of a row; empty: blocks of rows")
    columns: tuple[str, ...] = _setting((), "table: the columns of a row; empty: all that are numbers")
    format: str = _setting("", 'table: words such as "semicolon decimal-comma"; empty: detect the format')
    skip_bad: bool = _setting(False, "skip files and rows that cannot be read")

    def __attrs_post_init__(self) -> None:
        """Check that the data are named, and no column twice."""
        if not self.name.strip():
            raise ValueError(f"`data.name` must be a dataset or a path; got {self.name!r}.")
        for name in self.columns:
            if self.columns.count(name) > 1:
                raise ValueError(f"`data.columns` must all differ; got {name!r} twice.")


@attrs.frozen(slots=False, field_transformer=_typed)
class Recipe:
    """Everything that defines a training run: one TOML file, or a preset."""

    data: DataConfig
    pixels: str = _choice("map of pixels to real numbers", "logit", "gaussianise")
    alpha: float = _setting(1e-6, "margin of that map at both ends, as a fraction of its range", _ALPHA)
    missing: str = _choice("missing numbers of rows", "reject", "impute")
    scales: str = _choice("scales of columns: standardised, or chosen for each", "linear", "auto")
    flow: FlowConfig = attrs.field(factory=FlowConfig)
    process: ProcessConfig = attrs.field(factory=ProcessConfig)
    train: TrainConfig = attrs.field(factory=TrainConfig)

    def model(self, shape: tuple[int, ...], levels: int) -> ModelConfig:
        """The model for elements of this shape."""
        return ModelConfig(
            shape, levels, self.pixels, self.alpha, self.flow, self.process, self.missing, self.scales
        )


def describe(cls: Any = Recipe) -> dict[str, str]:
    """The description of every setting, by its name in --set."""
    result: dict[str, str] = {}
    for field in attrs.fields(cls):
        nested: Any = field.type
        result |= (
            describe(nested) if attrs.has(nested) else {_key(cls, field.name): field.metadata["description"]}
        )
    return result


def presets() -> dict[str, str]:
    """The presets with their titles, which are the first lines of their files."""
    files = sorted(_PRESETS.glob("*.toml"))
    return {file.stem: file.read_text("utf-8").splitlines()[0].lstrip("# ") for file in files}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A preset by name or a TOML file by path, changed by ``section.key=value`` settings."""
    path = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    if not path.is_file():
        hint = _nearest(name, presets(), "{!r}", "the presets are")
        raise ValueError(f"`preset` must be a preset or a .toml file; got {name!r}, {hint}")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # also of undecodable text, numbers and nesting
        raise ValueError(f"{path}: is not TOML: {error}.") from error
    for name, value in parse_settings(overrides).items():
        before = values.get(name, {})
        values[name] = before | value if isinstance(value, dict) and isinstance(before, dict) else value
    return from_dict(Recipe, values)


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
            raise ValueError(f"`--set` must be section.key=value, such as train.steps=500; got {setting!r}.")
        try:
            section[last] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            section[last] = text.strip()
    return nested


def from_dict(cls: type[T], values: Any) -> T:
    """A config from nested dictionaries; the error for an unknown key names the nearest known one."""
    if not isinstance(values, dict):
        raise ValueError(f"`{cls.__name__}` must be a table of settings; got {values!r:.80}.")
    known, path = attrs.fields_dict(typing.cast(Any, cls)), _key(cls, "")
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        name = str(_RENAMED.get(f"{path}{key}", key))
        if name not in known:
            hint = _nearest(name, sorted(known), f"`{path}{{}}`", "the settings are")
            raise ValueError(f"`{path}{name}` is not a setting of {cls.__name__}; {hint}")
        arguments[name] = value
    for name, field in known.items():
        if field.default is attrs.NOTHING and name not in arguments:
            raise ValueError(f"`{path}{name}` must be given: it has no default.")
    return cls(**arguments)


def _nearest(name: str, known: Iterable[str], form: str, all_are: str) -> str:
    """A hint: the nearest known name, or all of them."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {form.format(near[0])}?" if near else f"{all_are} {', '.join(known)}."


def to_dict(config: Any) -> dict[str, Any]:
    """The inverse of `from_dict`, ready for JSON."""
    return attrs.asdict(config)


def check_same(run: str, began: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise if a setting differs from that of the run. Settings that only one of them has are ignored."""
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
