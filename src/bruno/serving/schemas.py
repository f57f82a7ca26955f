"""The JSON of requests and responses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

_NUMBERS: dict[str, Any] = {"type": "array", "items": {}}
_ROW: dict[str, Any] = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}
Element = Annotated[
    Any,
    WithJsonSchema(
        {
            "title": "Element",
            "anyOf": [{"type": "string", "format": "byte"}, _NUMBERS, _ROW],
            "description": "An image: a PNG in base64, or its pixels as nested lists of whole numbers. Or a "
            "row: a list of numbers, or an object with a number for each column that GET /models lists; "
            "null, or an omitted column, is a missing number.",
        }
    ),
]
Elements = Annotated[list[Element], Field(description="One or several elements.")]
SetId = Annotated[str, Field(description="The id of an existing set.")]
Given = Annotated[Elements | None, Field(description="The elements of a set, instead of the id of one.")]
Warnings = Annotated[list[str], Field(description="Possible problems with the elements.")]
_Temperature = Annotated[float, Field(ge=0, le=100, description="Scales the spread of the latents.")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ScoreRequest(_Request):
    """Elements, and the set to score them by: `set`, `given`, or neither for the prior."""

    elements: Elements
    set: Annotated[str | None, Field(description="The id of an existing set.")] = None
    given: Given = None


class RankRequest(ScoreRequest):
    """Elements to rank by how well they fit a set."""

    top: Annotated[int | None, Field(ge=1, description="How many to return; all by default.")] = None


class SampleRequest(_Request):
    """The set to sample more of: `set`, `given`, or neither for the prior."""

    set: Annotated[str | None, Field(description="The id of an existing set.")] = None
    given: Given = None
    samples: Annotated[int, Field(ge=1)] = 8
    temperature: _Temperature = 1.0
    seed: Annotated[
        int | None,
        Field(ge=0, lt=2**63, description="The same seed gives the same samples; random by default."),
    ] = None


class ClassifyRequest(_Request):
    """Elements to classify, and for each class the id of a set or its elements."""

    elements: Elements
    support: Annotated[
        dict[str, SetId | Elements], Field(description="By class: the id of a set, or its elements.")
    ]
    prior: Annotated[
        dict[str, float] | None,
        Field(description="Probability of each class, in any unit; equal by default."),
    ] = None
    temperature: Annotated[
        float | None,
        Field(gt=0, le=1e6, description="Divides the log-probabilities; by default from the calibration."),
    ] = None
    none_rate: Annotated[
        float,
        Field(gt=0, lt=1, description="Rate at which elements of a class may be rejected as none of these."),
    ] = 0.01


class ElementsRequest(_Request):
    """Elements to add to a set, or to remove from it."""

    elements: Elements


class Failure(BaseModel):
    """Why a request was refused."""

    error: str


class ModelDescription(BaseModel):
    """A model of the service."""

    name: str
    kind: Annotated[str, Field(description="images or rows")]
    shape: list[int]
    levels: Annotated[int, Field(description="Number of values of a pixel; 0 for rows.")]
    columns: list[str]
    fingerprint: str
    calibrated: bool


class ModelList(BaseModel):
    """The models; the first is used if a request names none."""

    models: list[ModelDescription]


class ScoreResponse(BaseModel):
    """Scores in nats, in the order of the elements."""

    scores: Annotated[list[float], Field(description="log p(x | set) − log p(x)")]
    log_probs: Annotated[list[float], Field(description="log p(x | set)")]
    seen: Annotated[int, Field(description="Number of elements of the set.")]
    warnings: Warnings = []


class RankResponse(BaseModel):
    """The indices of elements in the request, the best first, and their scores."""

    order: list[int]
    scores: list[float]
    seen: int
    warnings: Warnings = []


class SampleResponse(BaseModel):
    """Samples: images as PNG in base64, rows as lists of numbers."""

    samples: Annotated[list[Element], Field(description="One for each sample.")]
    warnings: Warnings = []


class ClassifyResponse(BaseModel):
    """The most probable class of each element, and the probabilities of all classes."""

    labels: list[str]
    classes: list[str]
    probabilities: list[list[float]]
    scores: Annotated[list[list[float]], Field(description="log p(x | class) − log p(x)")]
    temperature: float
    p: Annotated[
        list[list[float]] | None, Field(description="p-values of the classes; null if not calibrated.")
    ] = None
    none_of_these: list[bool] | None = None
    warnings: Warnings = []


class SetDescription(BaseModel):
    """A set, with its number of elements."""

    id: str
    model: str
    count: int


class SetList(BaseModel):
    """Ids of sets in order, from the one after `after`, and the number of all sets."""

    model: str
    ids: list[str]
    count: int


class Added(SetDescription):
    """A set after elements were added."""

    added: int
    warnings: Warnings = []


class Removed(SetDescription):
    """A set after elements were removed."""

    removed: int
    warnings: Warnings = []


class Health(BaseModel):
    """Whether the service answers requests."""

    status: str
