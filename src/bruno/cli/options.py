"""Options that several commands share, as dataclasses whose fields become options of a command."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

import bruno
from bruno import limits
from bruno.cli.names import option_names
from bruno.settings import parse_settings
from bruno.text import arguments_renamed

if TYPE_CHECKING:
    from bruno.trained import Trained

_MOST_NUMBERS = 10_000  # that a range may have


def check_seed(seed: int | None) -> int | None:
    """Return the seed if it is valid; unlike limits set in typer, the rule does not clutter --help."""
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"`--seed` must be from 0 to 2**63 - 1; got {seed}.")
    return seed


ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run folder, a model file, or a pretrained model.")
]
DataDir = Annotated[
    Path | None, typer.Option(help="The folder of published datasets; $BRUNO_DATA by default.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:NUMBER, or auto for a GPU if there is one.")]
Seed = Annotated[int, typer.Option(help="The seed of all random numbers.", callback=check_seed)]
Given = Annotated[
    list[Path] | None, typer.Option(help="Your own images or rows, or a folder of them; may be repeated.")
]
Invert = Annotated[
    bool | None,
    typer.Option(
        "--invert/--no-invert",
        help="Whether your images have dark ink on bright paper; as in training by default.",
    ),
]
Group = Annotated[
    str | None, typer.Option(help="The column that names the set of a row; as in training by default.")
]
Rotations = Annotated[
    bool | None, typer.Option(help="Count rotated classes as classes; as in training by default.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip files and rows that cannot be read.")]
Temperature = Annotated[float, typer.Option(help="Below 1, samples are closer to the mean of the latents.")]
Views = Annotated[
    bool, typer.Option("--views", help="Score by the mean over the 8 rotations and reflections of an image.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="section.key=value, such as flow.filters=32 (see `bruno presets NAME`); may be repeated.",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and where to compute."""

    model: ModelName
    checkpoint: Annotated[str, typer.Option(help="For a run: last, or best on validation.")] = "last"
    data_dir: DataDir = None
    device: Device = "auto"
    seed: Seed = 0
    drawings: Annotated[
        bool | None,
        typer.Option(
            "--drawings/--no-drawings",
            help="Normalise your own images as line drawings; by default if trained on drawings.",
        ),
    ] = None

    def open(self) -> Trained:
        """The trained model."""
        with arguments_renamed({"path": "model"}):
            return bruno.open(
                self.model,
                checkpoint=self.checkpoint,
                device=self.device,
                data_dir=self.data_dir,
                drawings=self.drawings,
            )


@dataclass(frozen=True)
class DataOptions:
    """Which examples to use instead of the model's own test split."""

    data: Annotated[
        str | None,
        typer.Option(help="Use this, not the model's data: a known dataset, class folders, or a CSV."),
    ] = None
    split: Annotated[
        str | None, typer.Option(help="train, validation, trainval, all, or test (the default).")
    ] = None
    classes: Annotated[str | None, typer.Option(help="Only these classes, such as 1,3,5.")] = None
    invert: Invert = None

    @property
    def selection(self) -> dict[str, Any]:
        """The arguments that every job of a trained model takes."""
        classes = None if self.classes is None else self.classes.split(",")
        return {"data": self.data, "split": self.split, "classes": classes, "invert": self.invert}


@dataclass(frozen=True)
class ReadingOptions:
    """How to read the user's own files."""

    invert: Invert = None
    skip_bad: SkipBad = False

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments that every job on files takes."""
        return {"invert": self.invert, "skip_bad": self.skip_bad}


@dataclass(frozen=True)
class RunOptions:
    """How a run is trained."""

    settings: Settings = None
    out: Annotated[
        Path | None, typer.Option(help="The run folder; by default named after the preset or model.")
    ] = None
    steps: Annotated[int | None, typer.Option(help="Number of steps; by default the recipe's.")] = None
    minutes: Annotated[
        float | None, typer.Option(help="Train for this long, not for --steps; the schedule ends on time.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0
    verdict: Annotated[
        bool, typer.Option("--verdict/--no-verdict", help="Measure at the end how good the model is.")
    ] = True

    def __post_init__(self) -> None:
        if self.steps is not None and self.minutes is not None:
            raise ValueError(
                f"`--steps` and `--minutes` cannot be combined; got {self.steps} and {self.minutes}."
            )
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"`--minutes` must be above 0 and finite; got {self.minutes}.")
        check_number("--save-every", self.save_every, 0)

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings of --set, --steps and --minutes, as `bruno.train` takes them."""
        settings = parse_settings(self.settings or [])
        for name in ("steps", "minutes"):
            if (value := getattr(self, name)) is not None:
                settings.setdefault("train", {})[name] = value
        if self.steps is not None:
            settings["train"]["minutes"] = 0.0  # not those of --set
        return settings


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as typer takes it: the fields of its dataclass parameters are parameters of their own."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in groups:
            own = get_type_hints(groups[parameter.name], include_extras=True)
            for field in fields(groups[parameter.name]):
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                parameters.append((field.name, own[field.name], default))
        else:
            parameters.append((parameter.name, hints[parameter.name], parameter.default))
    parameters = [(name, _with_strict_values(hint), default) for name, hint, default in parameters]
    # Arguments without a default come first, in the order they are written.
    parameters.sort(key=lambda one: one[2] is not inspect.Parameter.empty)

    @functools.wraps(function)
    def flat(context: typer.Context, **values: Any) -> Any:
        if context.obj is not None:  # where messages look names up
            context.obj.update(option_names(context))
        grouped = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return function(**grouped, **values)

    del flat.__wrapped__  # typer would look through to the function's own signature
    parameters.insert(0, ("context", typer.Context, inspect.Parameter.empty))
    flat.__annotations__ = {name: hint for name, hint, _ in parameters}
    flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, hint, default in parameters
        ]
    )
    return flat


def _with_strict_values(hint: Any) -> Any:
    """The type of an option; its numbers and paths are parsed by functions stricter than Python's."""
    kinds = _kinds_in(get_args(hint)[0]) & _PARSERS.keys()
    if not kinds:
        return hint
    option = copy.copy(hint.__metadata__[0])
    option.parser, metavar = _PARSERS[kinds.pop()]
    option.metavar = option.metavar or metavar
    return Annotated[get_args(hint)[0], option]


def _kinds_in(hint: Any) -> set[Any]:
    """The types that a type consists of: `list[Path] | None` of list, Path and None."""
    return {hint}.union(*map(_kinds_in, get_args(hint)))


def _whole(value: Any) -> int:
    """A whole number; unlike `int`, not 1_400 and no digits of other scripts."""
    if isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]{1,4000}", value):
        raise typer.BadParameter(f"{value!r} is not a valid integer.")
    return int(value)


def _real(value: Any) -> float:
    """A number; unlike `float`, not 1_400 and no digits of other scripts."""
    try:
        if isinstance(value, str) and ("_" in value or not value.isascii()):
            raise ValueError
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a valid float.") from None


def _path(value: Any) -> Path:
    """A path; unlike `Path`, an empty one is not the current folder."""
    if not str(value):
        raise typer.BadParameter("it is empty. The current folder is `.`.")
    return Path(value)


_PARSERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_whole, "INTEGER"),
    float: (_real, "FLOAT"),
    Path: (_path, "PATH"),
}


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers in a text such as 1,5 or 480-500."""
    try:
        if not re.fullmatch(r"[0-9, -]*", text):
            raise ValueError("other characters than digits")
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
        if any(len(part) > 2 or part[-1] < part[0] for part in ranges):
            raise ValueError("a range has two ends, the lower one first")
    except ValueError as error:
        raise ValueError(f"`{option}` takes numbers, such as 1,5 or 480-500; got {text!r}.") from error
    if sum(part[-1] - part[0] for part in ranges) > _MOST_NUMBERS:
        raise ValueError(f"`{option}` takes at most {_MOST_NUMBERS:,} numbers; got {text!r}.")
    return tuple(n for part in ranges for n in range(part[0], part[-1] + 1))


def check_number(
    option: str, value: float, least: float = -math.inf, most: float = math.inf, *, limited: bool = True
) -> None:
    """Raise unless an option's number is finite and within its limits; a count is `limited` to those."""
    if isinstance(value, int) and limited:
        limits.COUNT.check_argument(option, value, value)
    finite = isinstance(value, int) or math.isfinite(value)
    if not (finite and least <= value <= most):
        rules = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
        raise ValueError(f"`{option}` must be {' and '.join(rules) or 'a finite number'}; got {value}.")
