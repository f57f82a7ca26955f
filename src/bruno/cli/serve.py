"""`bruno serve`."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bruno.cli.options import Device
from bruno.cli.output import console, print_message
from bruno.text import arguments_renamed

if TYPE_CHECKING:
    from bruno.serving import Limits

_TOKEN = "BRUNO_TOKEN"
_RENAMED = {  # arguments of the library, by the names of the options
    "path": "models",
    "body": "max_body",
    "elements": "max_elements",
    "waiting": "max_waiting",
    "seconds": "timeout",
    "token": "token_file",
}


@dataclass(frozen=True)
class LimitOptions:
    """What the service accepts."""

    max_body: Annotated[int, typer.Option(help="Maximum number of bytes in a request.")] = 4 * 2**20
    max_elements: Annotated[int, typer.Option(help="Maximum number of elements or samples in a request.")] = (
        256
    )
    max_waiting: Annotated[
        int, typer.Option(help="Maximum number of requests in progress; further ones get 503.")
    ] = 256
    timeout: Annotated[float, typer.Option(help="Seconds to answer a request; after that, 503.")] = 60.0

    @property
    def limits(self) -> Limits:
        """The limits, as `bruno.serving` takes them."""
        from bruno.serving import Limits

        return Limits(
            body=self.max_body,
            memory=max(Limits.memory, self.max_body),
            elements=self.max_elements,
            samples=self.max_elements,
            waiting=self.max_waiting,
            seconds=self.timeout,
        )


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Run folders, model files or pretrained models; NAME=MODEL names one."
        ),
    ],
    limits: LimitOptions,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for any free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the bearer token; $BRUNO_TOKEN by default.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name that clients use for this machine; may be repeated.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="The folder for the sets of all models; by default, each model's folder."),
    ] = None,
    batching: Annotated[
        bool, typer.Option("--batching/--no-batching", help="Compute waiting requests together.")
    ] = True,
    checkpoint: Annotated[str, typer.Option(help="For a run: last, or best on validation.")] = "last",
    device: Device = "auto",
) -> None:
    """Serve models over HTTP: score, sample, classify and rank, and store sets."""
    from bruno.serving import read_token
    from bruno.serving import serve as serve_models

    token = os.environ.get(_TOKEN) or None
    with arguments_renamed(_RENAMED):
        serve_models(
            models,
            host=host,
            port=port,
            store=store,
            token=token if token_file is None else read_token(token_file),
            hosts=allow_host or (),
            limits=limits.limits,
            batching=batching,
            checkpoint=checkpoint,
            device=device,
            ready=partial(_show_address, needs_names=_is_any_address(host) and not allow_host),
        )


def _show_address(address: str, *, needs_names: bool = False) -> None:
    console.print(f"{address}  (documentation: {address}docs; Ctrl-C to stop)", soft_wrap=True)
    if needs_names:
        print_message(
            "note",
            "requests from other machines are refused, until `--allow-host` gives the name or the address by "
            "which they reach this machine.",
            "yellow",
        )


def _is_any_address(host: str) -> bool:
    """Whether a host stands for all addresses of this machine, none of which is the name in a request."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False
