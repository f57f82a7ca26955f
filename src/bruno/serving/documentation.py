"""The content of /openapi.json as one HTML page that loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from pydantic import BaseModel

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 0.25rem; font: 600 1.1rem ui-monospace, monospace; }
h2 b { display: inline-block; min-width: 4.5rem; }
table { border-collapse: collapse; margin: 0.5rem 0; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
td { border-top: 1px solid #8884; }
td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; }
"""


_KEY = (
    "Any text that is new for each change, such as a UUID. A repeated request with the same key changes "
    "nothing, and has the same answer."
)


def documented_request(
    method: str, path: str, body: type[BaseModel] | None, query: Mapping[str, str]
) -> dict[str, Any]:
    """The parameters and the body of an operation, for its OpenAPI document."""
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": text, "description": words} for name, words in query.items()
    ]
    if "{id}" in path:
        place = {"name": "id", "in": "path", "required": True, "schema": text, "description": "The set."}
        parameters.insert(0, place)
    if method in ("PUT", "DELETE"):
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": True,
                "schema": text,
                "description": _KEY,
            }
        )
    found: dict[str, Any] = {"parameters": parameters}
    if body is not None:
        content: dict[str, Any] = {"application/json": {"schema": body.model_json_schema()}}
        if "elements" in body.model_fields:
            content["image/png"] = {"schema": {"type": "string", "format": "binary"}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def documentation_page(openapi: dict[str, Any]) -> str:
    """The operations of an OpenAPI document with their parameters, bodies and answers, as HTML."""
    info, schemas = openapi["info"], openapi.get("components", {}).get("schemas", {})
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])} A ? marks what may be omitted. For programs: "
        "<a href=/openapi.json>openapi.json</a>.</p>",
    ]
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation, schemas)
    return "\n".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    parts = [f"<h2><b>{method.upper()}</b> {escape(path)}</h2>", f"<p>{escape(operation['description'])}</p>"]
    parameters = [
        (f"{one['name']} ({one['in']})", one.get("description") or one["schema"].get("description", ""))
        for one in operation.get("parameters", [])
    ]
    parts += _table("Parameters", parameters)
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        parts += _table("Body", _fields(content["application/json"]["schema"]))
    if "image/png" in content:
        parts.append("<p>Or a PNG as the body, with the other fields in the query.</p>")
    answer = operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema", {})
    return parts + _table("Answer", _fields(schemas.get(answer.get("$ref", "").split("/")[-1], {})))


def _fields(schema: dict[str, Any]) -> list[tuple[str, str]]:
    """The names of the fields of an object, and their descriptions."""
    required = schema.get("required", [])
    found = []
    for name, field in schema.get("properties", {}).items():
        words = [field.get("description", "")]
        if "default" in field and field["default"] not in (None, []):
            words.append(f"By default {json.dumps(field['default'])}.")
        found.append((name if name in required else f"{name}?", " ".join(filter(None, words))))
    return found


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    cells = "".join(f"<tr><td>{escape(name)}<td>{escape(text)}" for name, text in rows)
    return [f"<table><tr><th>{title}<th>{cells}</table>"]
