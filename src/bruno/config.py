"""What a model and its training are, as data: frozen dataclasses, from and to dictionaries and TOML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_PRESETS = Path(__file__).parent / "presets"
_PIXELS = ("logit", "gaussianise")
_RENAMED = {"train.length": "set_size"}  # settings of files written by version 0.1


@dataclass(frozen=True)
class FlowConfig:
    """The bijection: `kind` "conv" (multi-scale, for images) or "dense" (for vectors and small images)."""

    kind: str = "conv"
    scales: int = 2
    filters: int = 64
    blocks: int = 8
    squeeze_first: bool = False
    couplings: int = 6  # dense ones
    units: int = 1024  # of the dense ones
    weight_norm: bool = True

    def __post_init__(self) -> None:
        check_choice("flow.kind", self.kind, ("conv", "dense"))
        for name in ("scales", "filters", "units"):
            check_at_least(f"flow.{name}", getattr(self, name), 1)
        for name in ("blocks", "couplings"):
            check_at_least(f"flow.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class ProcessConfig:
    """The process: `kind` "student-t" or "gaussian", and where its parameters start.

    The first `leading` dimensions may start with a correlation of their own: what a class has in common then
    has somewhere to go.
    """

    kind: str = "student-t"
    dof: float = 1000.0
    variance: float = 1.0
    correlation: float = 0.1
    leading: int = 0
    leading_correlation: float = 0.9

    def __post_init__(self) -> None:
        check_choice("process.kind", self.kind, ("student-t", "gaussian"))
        check_at_least("process.leading", self.leading, 0)


@dataclass(frozen=True)
class ModelConfig:
    """A model of sets whose elements have this shape.

    Integers on 0..levels − 1 are dequantised and put on the whole line by `pixels`, "logit" or "gaussianise",
    with this alpha; with 0 levels the elements are real numbers, standardised instead.
    """

    shape: tuple[int, ...]
    levels: int = 256
    pixels: str = "logit"
    alpha: float = 1e-6
    flow: FlowConfig = field(default_factory=FlowConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)

    def __post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape):
            raise ValueError(f"`shape` must be positive sizes, as (1, 28, 28) or (7,); got {self.shape}.")
        if self.levels == 1 or self.levels < 0:
            raise ValueError(f"`levels` must be at least 2, or 0 for real numbers; got {self.levels}.")
        check_choice("pixels", self.pixels, _PIXELS)


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained: on sets of one class, on k-way n-shot episodes, or on a weighted sum of both.

    The rate warms up over a share of the run, stays or decays ("linear" and "cosine" to `final_rate`,
    "exponential" likewise), all in terms of progress, so that a run of minutes has the same shape as one of
    steps. The process has a rate of its own, `process_rate` times the flow's. `precision` and `graph` are for
    a GPU: networks in bfloat16, and the whole step compiled and captured as one CUDA graph.
    """

    steps: int = 1000
    minutes: float = 0.0  # how long to train, by the clock, instead of how many steps; 0: by steps
    batch: int = 32
    set_size: int = 20
    generative: float = 1.0  # weight of bits/dim
    discriminative: float = 0.0  # weight of the cross-entropy of episodes
    onset: float = 0.0  # the share of the run, its first, in which that does not count yet
    episodes: int = 8
    way: int = 20
    shot: int = 1
    queries: int = 1  # of each class of an episode
    shared: bool = False  # bits/dim are those of the episodes' classes: an image counts for both losses
    optimiser: str = "adamw"
    rate: float = 1e-3
    process_rate: float = 3.0
    weight_decay: float = 0.0
    warmup: float = 0.02
    decay: str = "linear"
    final_rate: float = 0.0  # as a share of the rate
    clip: float = 0.0  # largest norm of the gradient; 0 for none
    ema: float = 0.0  # how much the averaged weights keep at each step; 0 for no averaging
    mirror: bool = False  # every other set, as a whole
    shift: int = 0  # move each image by up to so many pixels, fractions too if it is downsample after
    # Slant, turn and stretch each set as a whole, and each image by itself: how far the linear map is from
    # the identity, at first. Such images are not quite those to be modelled, so both fade, and the last
    # steps see images as they are.
    slant: float = 0.0
    warp: float = 0.0
    fade: float = 1.0  # over this share of the run, its last; 0 for never
    precision: str = "bfloat16"
    graph: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("train.optimiser", self.optimiser, ("adamw", "adam", "rmsprop"))
        check_choice("train.decay", self.decay, ("linear", "cosine", "exponential", "none"))
        check_choice("train.precision", self.precision, ("float32", "bfloat16"))
        for name in ("steps", "batch", "set_size", "episodes", "shot", "queries"):
            check_at_least(f"train.{name}", getattr(self, name), 1)
        check_at_least("train.way", self.way, 2)
        for name in (
            "generative",
            "discriminative",
            "rate",
            "process_rate",
            "weight_decay",
            "clip",
            "minutes",
            "slant",
            "warp",
        ):
            check_at_least(f"train.{name}", getattr(self, name), 0)
        check_at_least("train.shift", self.shift, 0)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"`train.seed` must be from 0 to 2**63 - 1; got {self.seed}.")
        if self.onset and not self.generative:
            raise ValueError(
                f"`train.onset` needs a weight of bits/dim above 0, to train on until then; got {self.onset}."
            )
        if not 0 <= self.fade <= 1:
            raise ValueError(f"`train.fade` must be from 0 to 1; got {self.fade}.")
        for name in ("onset", "warmup", "final_rate", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`train.{name}` must be from 0 up to 1; got {getattr(self, name)}.")
        if not self.generative and not self.discriminative:
            raise ValueError("`train.generative` or `train.discriminative` must be above 0; got 0 for both.")
        if self.shared and not (self.generative and self.discriminative):
            raise ValueError("`train.shared` needs weights above 0 for both losses; one of them is 0.")
        if self.decay == "exponential" and not self.final_rate:
            raise ValueError("`train.final_rate` must be above 0 for an exponential decay; got 0.")

    @property
    def min_count(self) -> int:
        """Elements that every class must have."""
        sets = self.set_size * bool(self.generative and not self.shared)
        return max(1, sets, (self.shot + self.queries) * bool(self.discriminative))

    @property
    def elements(self) -> int:
        """How many are encoded in a step."""
        sets = self.batch * self.set_size * bool(self.generative and not self.shared)
        return sets + self.episodes * self.way * (self.shot + self.queries) * bool(self.discriminative)


@dataclass(frozen=True)
class DataConfig:
    """What a model learns from: a named data set, or the path of a folder, archive, npz or CSV."""

    name: str
    split: str = "train"  # or "trainval", once all choices are made
    rotations: bool = False  # every class four times, rotated by multiples of 90 degrees
    original: bool = (
        False  # learn from images in the size they were published in, downsample last in each step
    )
    classes: tuple[str, ...] = ()  # only these; all if empty
    size: int = 0  # for images of your own: resize to this height and width
    colour: bool = False  # for images of your own: three channels
    invert: bool = False  # for images of your own: dark ink on bright paper becomes bright ink
    group: str = ""  # for a CSV: the column that names the set
    columns: tuple[str, ...] = ()  # for a CSV: the numbers of a row; all other columns if empty
    skip_bad: bool = False  # leave out what cannot be read

    def __post_init__(self) -> None:
        check_choice("data.split", self.split, ("train", "trainval"))
        check_at_least("data.size", self.size, 0)
        for name in self.columns:
            if self.columns.count(name) > 1:
                raise ValueError(f"`data.columns` must all differ; {name!r} is there twice.")


@dataclass(frozen=True)
class Recipe:
    """All that a training run is made from: one TOML file, or a preset of that name."""

    data: DataConfig
    pixels: str = "logit"  # or "gaussianise": how integers get to the whole line
    alpha: float = 1e-6  # how much of it stays free at each end
    flow: FlowConfig = field(default_factory=FlowConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_choice("pixels", self.pixels, _PIXELS)

    def model(self, shape: tuple[int, ...], levels: int) -> ModelConfig:
        """The model for elements of this shape."""
        return ModelConfig(shape, levels, self.pixels, self.alpha, self.flow, self.process)


def presets() -> dict[str, str]:
    """The recipes that come with the package, and the first line of each: what it is."""
    files = sorted(_PRESETS.glob("*.toml"))
    return {file.stem: file.read_text("utf-8").splitlines()[0].lstrip("# ") for file in files}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A preset by name or a TOML file by path, with ``section.key=value`` settings put over it."""
    path = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(name, presets(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(presets())}."
        raise ValueError(f"`preset` must be a preset or a .toml file; got {name!r}, {hint}")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not TOML: {error}.") from error
    return override(Recipe, values, overrides)


def override(cls: type[T], values: dict[str, Any], settings: Sequence[str]) -> T:
    """A dataclass from nested dictionaries with ``section.key=value`` settings put over them."""
    for setting in settings:
        _set(values, setting)
    return from_dict(cls, values)


def named(settings: Sequence[str], *keys: str) -> bool:
    """Whether some of ``section.key=value`` settings are of these keys."""
    return any(setting.partition("=")[0].strip() in keys for setting in settings)


def _set(values: dict[str, Any], setting: str) -> None:
    """``train.steps=50`` as a person types it: a word needs no quotes."""
    key, equals, text = setting.partition("=")
    *path, last = key.strip().split(".")
    if not equals or not last:
        raise ValueError(f"`--set` takes key.sub=value, as train.steps=500; got {setting!r}.")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ValueError(
                f"`--set` takes key.sub=value, as train.steps=500; {name} has no sub: {setting!r}."
            )
    try:
        values[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[last] = text.strip()


def from_dict(cls: type[T], values: dict[str, Any], path: str = "") -> T:
    """A dataclass from nested dictionaries; an unknown key is an error that names the nearest known one."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        name = _RENAMED.get(f"{path}{name}", name)
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean `{path}{near[0]}`?" if near else f"known are {', '.join(sorted(known))}."
            raise ValueError(f"`{path}{name}` is not a setting of {cls.__name__}; {hint}")
        if dataclasses.is_dataclass(hints[name]):
            _check_type(f"{path}{name}", value, dict)
            value = from_dict(hints[name], value, f"{path}{name}.")
        elif typing.get_origin(hints[name]) is tuple:
            _check_type(f"{path}{name}", value, list, tuple)
            for part in value:
                _check_type(f"{path}{name}", part, typing.get_args(hints[name])[0])
            value = tuple(value)
        elif hints[name] is float:
            _check_type(f"{path}{name}", value, float, int)
            if not math.isfinite(value):
                raise ValueError(f"`{path}{name}` must be a finite number; got {value}.")
        else:
            _check_type(f"{path}{name}", value, hints[name])
        arguments[name] = value
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in arguments:
            raise ValueError(f"`{path}{f.name}` must be given: it has no default.")
    return cls(**arguments)


def _check_type(name: str, value: Any, *types: type) -> None:
    # bool is an int to Python, but not to a person
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names: dict[type, str] = {dict: "a table", str: "a word", list: 'a list, as ["a", "b"] or [1, 2]'}
        wanted = " or ".join(names.get(t, t.__name__) for t in types if t is not tuple)
        raise ValueError(f"`{name}` must be {wanted}; got {value!r}.")


def to_dict(config: Any) -> dict[str, Any]:
    """The inverse of `from_dict`, ready for JSON."""
    return dataclasses.asdict(config)


def check_same(run: str, began: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise unless nested settings are those that a run began with, as far as both have them."""
    before, after = flat(json.loads(json.dumps(began))), flat(json.loads(json.dumps(now)))
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            raise ValueError(
                f"`{key}` must be as the run {run} began, {before[key]}; got {after[key]}. "
                "Repeat its settings, or start another run."
            )


def flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with keys as --set has them: ``flow.filters``."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return result


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """A setting is one of a few words."""
    if value not in choices:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, choices))}; got {value!r}.")


def check_at_least(name: str, value: float, least: float) -> None:
    """A setting has a lower limit."""
    if not value >= least:  # which NaN is not either
        raise ValueError(f"`{name}` must be at least {least}; got {value}.")
