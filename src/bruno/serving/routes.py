"""The routes of the service: each reads a request, runs one job, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from bruno.serving import schemas
from bruno.serving.decoding import check_number_of
from bruno.serving.http import PNG, answer, as_base64, checked_id, key_and_digest, parse, picture, query_of
from bruno.serving.jobs import Given, ServedModel
from bruno.serving.service import Service
from bruno.serving.settings import RequestError

_MAX_IDS = 1000  # of a list of sets


class Routes:
    """The functions behind the paths of the service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    # --- tasks -------------------------------------------------------------------------------------------

    async def score(self, request: Request) -> Response:
        """log p(x | set) − log p(x) of elements: how much more likely they are given the set."""
        asked = parse(request, schemas.ScoreRequest, set=query_of(request).get("set"))
        name, served = self._model(request)
        x, given, size = await self._elements_and_set(name, asked)
        found = await self.service.run(name, served.score(x, given), size)
        return answer(
            {"scores": found.scores.tolist(), "log_probs": found.log_probs.tolist(), "seen": found.seen}
            | _warnings(served, x)
        )

    async def rank(self, request: Request) -> Response:
        """Rank elements by how well they fit a set, the best first."""
        asked = parse(request, schemas.RankRequest, set=query_of(request).get("set"))
        name, served = self._model(request)
        x, given, size = await self._elements_and_set(name, asked)
        found, order = await self.service.run(name, served.rank(x, given), size)
        best = order[: asked.top]
        return answer(
            {"order": best.tolist(), "scores": found.scores[best].tolist(), "seen": found.seen}
            | _warnings(served, x)
        )

    async def sample(self, request: Request) -> Response:
        """More of the same: samples of the next element of a set. `Accept: image/png` for one picture."""
        asked = parse(request, schemas.SampleRequest)
        name, served = self._model(request)
        if asked.samples > self.service.limits.samples:
            raise RequestError(
                413, f"`samples` must be at most {self.service.limits.samples}; got {asked.samples}."
            )
        given = await self._given(name, asked)
        size = asked.samples + _size(given)
        job = served.sample(given, asked.samples, asked.temperature, asked.seed)
        samples = await self.service.run(name, job, size)
        levels = served.model.levels
        if PNG in request.headers.get("accept", ""):
            if not levels:
                raise RequestError(406, "`Accept` must be JSON for a model of rows; got image/png.")
            return picture(samples, levels)
        return answer({"samples": as_base64(samples, levels) if levels else samples.tolist()})

    async def classify(self, request: Request) -> Response:
        """Probabilities of classes for elements, and whether they belong to none; each class is a set."""
        ids = query_of(request).getlist("set")
        asked = parse(request, schemas.ClassifyRequest, support={one: one for one in ids} or None)
        name, served = self._model(request)
        if len(asked.support) < 2:
            raise RequestError(422, f"`support` must have at least two classes; got {len(asked.support)}.")
        sizes = [1 if isinstance(one, str) else len(one) for one in asked.support.values()]
        total = len(asked.elements) + sum(sizes)
        check_number_of(total, self.service.limits, "elements and support")
        prior = _prior_of(asked)
        x = await self.service.read(name, asked.elements)
        classes: dict[str, Given] = {}
        for label, one in asked.support.items():
            if isinstance(one, str):
                classes[label] = one
            else:
                classes[label] = await self.service.read(name, one, f"support.{label}")
        job = served.classify(x, classes, prior, asked.temperature, asked.none_rate)
        found = await self.service.run(name, job, total)
        return answer(
            {
                "labels": [found.classes[i] for i in found.labels.tolist()],
                "classes": found.classes,
                "probabilities": found.probabilities.tolist(),
                "scores": found.scores.tolist(),
                "temperature": found.temperature,
                "p": None if found.p is None else found.p.tolist(),
                "none_of_these": None if found.none_of_these is None else found.none_of_these.tolist(),
            }
            | _warnings(served, x)
        )

    # --- sets --------------------------------------------------------------------------------------------

    async def add_elements(self, request: Request) -> Response:
        """Add elements to a set, which is created if it does not exist."""
        name, served, id, x, once = await self._change(request)
        done = await self.service.run(name, served.add(id, x, *once), len(x))
        return answer({"model": name, **done} | _warnings(served, x))

    async def remove_elements(self, request: Request) -> Response:
        """Remove elements from a set, exactly, as if they had never been added."""
        name, served, id, x, once = await self._change(request)
        done = await self.service.run(name, served.remove(id, x, *once), len(x))
        return answer({"model": name, **done})

    async def delete_set(self, request: Request) -> Response:
        """Delete a set."""
        name, served = self._model(request)
        id = checked_id(request)
        once = key_and_digest(request, name, id)
        return answer({"model": name, **await self.service.run(name, served.delete(id, *once))})

    async def get_set(self, request: Request) -> Response:
        """The size of a set."""
        name, served = self._model(request)
        return answer({"model": name, **await self.service.run(name, served.describe(checked_id(request)))})

    async def list_sets(self, request: Request) -> Response:
        """The ids of sets, in order."""
        after, limit = query_of(request).get("after", ""), query_of(request).get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_IDS):
            raise RequestError(422, f"`limit` must be from 1 to {_MAX_IDS}; got {limit[:60]!r}.")
        name, served = self._model(request)
        return answer({"model": name, **await self.service.run(name, served.list(after, int(limit)))})

    # --- the service -------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """The models of the service."""
        return answer(
            {"models": [_description(name, served) for name, served in self.service.models.items()]}
        )

    async def health(self, request: Request) -> Response:
        """Whether the service answers requests."""
        return answer({"status": "ok"})

    # --- parts -------------------------------------------------------------------------------------------

    def _model(self, request: Request) -> tuple[str, ServedModel]:
        """The model that a request names, and its name; the first model if it names none."""
        return self.service.model(query_of(request).get("model"))

    async def _elements_and_set(self, name: str, asked: schemas.ScoreRequest) -> tuple[Tensor, Given, int]:
        """The elements of a request, its set, and the number of all elements."""
        total = len(asked.elements) + len(asked.given or ())
        check_number_of(total, self.service.limits, "elements and given")
        x = await self.service.read(name, asked.elements)
        return x, await self._given(name, asked), total

    async def _given(self, name: str, asked: schemas.ScoreRequest | schemas.SampleRequest) -> Given:
        if asked.set is not None and asked.given is not None:
            raise RequestError(422, "`set` and `given` cannot be combined; got both.")
        return asked.set if asked.given is None else await self.service.read(name, asked.given, "given")

    async def _change(self, request: Request) -> tuple[str, ServedModel, str, Tensor, tuple[str, bytes]]:
        """The model, the set, the elements, and the key and digest of a request that changes a set."""
        name, served = self._model(request)
        id = checked_id(request)
        once = key_and_digest(request, name, id)
        asked = parse(request, schemas.ElementsRequest)
        return name, served, id, await self.service.read(name, asked.elements), once


def _size(given: Given) -> int:
    return len(given) if isinstance(given, Tensor) else 0


def _prior_of(asked: schemas.ClassifyRequest) -> Sequence[float] | None:
    """The prior in the order of the classes."""
    if asked.prior is None:
        return None
    if asked.prior.keys() != asked.support.keys() or not all(0 < p < 1e300 for p in asked.prior.values()):
        raise RequestError(422, "`prior` must have a number above 0 for each class of `support`.")
    return [asked.prior[label] for label in asked.support]


def _warnings(served: ServedModel, x: Tensor) -> dict[str, Any]:
    """A warning if images are probably inverted."""
    if served.is_images and (reason := served.trained.familiarity.too_bright(x)):
        return {"warnings": [f"images are unlike the training images: {reason}. Are they inverted?"]}
    return {}


def _description(name: str, served: ServedModel) -> dict[str, Any]:
    model = served.model
    return {
        "name": name,
        "kind": model.kind.plural,
        "shape": list(model.shape),
        "levels": model.levels,
        "columns": list(served.trained.columns),
        "fingerprint": model.fingerprint(),
        "calibrated": served.is_calibrated,
    }
