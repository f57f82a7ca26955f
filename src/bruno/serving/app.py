"""The HTTP application: routes and their documentation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

import bruno
from bruno.serving import schemas
from bruno.serving.documentation import documentation_page, documented_request
from bruno.serving.guard import Guard, check_hosts
from bruno.serving.http import failure
from bruno.serving.routes import Routes
from bruno.serving.service import Models, Service
from bruno.serving.settings import Limits, RequestError
from bruno.serving.static import page_routes

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

_MIN_TOKEN = 16  # characters
_MODEL = "A model; the first by default."
_OF_THE_SERVICE = ("/models", "/health")


def create_app(
    models: Models,
    *,
    store: str | Path | None = None,
    token: str | None = None,
    hosts: Iterable[str] = (),
    limits: Limits | None = None,
    batching: bool = True,
    checkpoint: str = "last",
    device: str = "auto",
) -> FastAPI:
    """An ASGI application that serves models. It closes their stores when it is shut down.

    Args:
        models: trained models by name, or a list of paths and of names of pretrained models. The name of a
            model in a list is the last part of its path; NAME=PATH sets another name.
        store: the folder for the sets of all models, as NAME.db; ":memory:" for none. By default, the file
            `sets.db` in the folder of each model.
        token: the bearer token that requests must have; without one, the service answers everyone.
        hosts: names that the Host header may have, besides 127.0.0.1 and localhost.
        limits: limits on requests.
        batching: compute requests that are waiting at the same time as one batch.
        checkpoint: which checkpoint of run folders: "last", or "best" on validation.
        device: "auto", "cpu", "cuda" or "cuda:NUMBER".
    """
    hosts = tuple(hosts)
    check_token(token)
    check_hosts(hosts)
    service = Service(
        models, store=store, limits=limits, batching=batching, checkpoint=checkpoint, device=device
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="BRUNO",
        version=bruno.__version__,
        description="Exact, exchangeable deep models of sets. Numbers are in nats.",
        docs_url=None,  # FastAPI's page would load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # /metrics has its own
    )
    app.state.service = service
    pages = page_routes()
    app.add_middleware(_Shortcut, app.router.routes)
    app.add_middleware(
        Guard, service.limits, service.metrics, hosts=hosts, token=token, public=[page.path for page in pages]
    )
    _handle_errors(app)
    _add_routes(app, Routes(service))
    app.router.routes += pages
    return app


def check_token(token: str | None) -> None:
    """Raise ValueError unless a token is long enough, and can be sent in a header."""
    if token is None:
        return
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"`token` must be at least {_MIN_TOKEN} printable ASCII characters without spaces; got "
            f"{len(token)} characters. Make one: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )


def _handle_errors(app: FastAPI) -> None:
    """Answer every error with one line in JSON."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return failure(error)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        return failure(RequestError(error.status_code, f"{error.detail}. See /docs."))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return failure(RequestError(500, "the service failed; its log says why."))


class _Route(APIRoute):
    """A route that FastAPI documents, and whose function takes the request as it is."""

    def get_route_handler(self) -> Handler:
        """The function of the route."""
        handler: Handler = self.endpoint
        return handler


class _Shortcut:
    """Calls the functions of routes with a fixed path directly, as FastAPI's routing takes long."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, _Route) and "{" not in route.path
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope.get("method", ""), scope.get("path", "")))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.endpoint(Request(scope, receive))
        except RequestError as error:
            response = failure(error)
        await response(scope, receive, send)


def _add_routes(app: FastAPI, routes: Routes) -> None:
    def add(
        method: str,
        path: str,
        function: Any,
        answer: type[BaseModel],
        body: type[BaseModel] | None = None,
        *,
        query: Mapping[str, str] | None = None,
    ) -> None:
        known = {"model": _MODEL, **(query or {})} if path not in _OF_THE_SERVICE else {}
        app.router.routes.append(
            _Route(
                path,
                function,
                methods=[method],
                response_model=None,
                responses={200: {"model": answer}, "4XX": {"model": schemas.Failure}},
                openapi_extra=documented_request(method, path, body, known),
            )
        )

    image = {"set": "With a PNG as the body: the id of a set."}
    classes = {"set": "With a PNG as the body: the id of a set for each class, repeated."}
    listed = {"after": "Only ids after this one.", "limit": "At most this many, up to 1000; 100 by default."}
    add("POST", "/score", routes.score, schemas.ScoreResponse, schemas.ScoreRequest, query=image)
    add("POST", "/sample", routes.sample, schemas.SampleResponse, schemas.SampleRequest)
    add(
        "POST", "/classify", routes.classify, schemas.ClassifyResponse, schemas.ClassifyRequest, query=classes
    )
    add("POST", "/rank", routes.rank, schemas.RankResponse, schemas.RankRequest, query=image)
    add("GET", "/sets", routes.list_sets, schemas.SetList, query=listed)
    add("GET", "/sets/{id}", routes.get_set, schemas.SetDescription)
    add("DELETE", "/sets/{id}", routes.delete_set, schemas.SetDescription)
    add("PUT", "/sets/{id}/elements", routes.add_elements, schemas.Added, schemas.ElementsRequest)
    add("DELETE", "/sets/{id}/elements", routes.remove_elements, schemas.Removed, schemas.ElementsRequest)
    add("GET", "/models", routes.models, schemas.ModelList)
    add("GET", "/health", routes.health, schemas.Health)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(routes.service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(documentation_page(app.openapi()), media_type="text/html")
