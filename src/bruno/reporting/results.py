"""Results as values: JSON and PNG beside the run, and one page of them that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bruno.files import atomic_write
from bruno.provenance import provenance

_FOLDER = "results"
_LONG = 12  # rows of a table that is folded away


@dataclass(frozen=True)
class Result:
    """What a command found out.

    Attributes:
        name: of its files: NAME.json and NAME.png.
        title: what it is, for people.
        values: the numbers, for machines.
        columns: of a table for people.
        rows: of that table, as text.
        note: a sentence on how to read it.
        picture: PNG bytes, if it has one.
        provenance: of one that was read again: command, commit, seed, hardware, versions.
        model: the fingerprint of the model that it is of, if it is of one.
    """

    name: str
    title: str
    values: dict[str, Any]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    picture: bytes = b""
    provenance: dict[str, Any] = field(default_factory=dict)
    model: str = ""

    def write(self, run: Path, *, config: dict[str, Any], seed: int) -> Path:
        """Into the results of a run, with what it takes to check it; returns the path of the JSON."""
        folder = run / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if self.picture:
            with atomic_write(folder / f"{self.name}.png") as beside:
                beside.write_bytes(self.picture)
        record = {
            "title": self.title,
            "note": self.note,
            "columns": self.columns,
            "rows": self.rows,
            "values": self.values,
            "model": self.model,
            "config": config,
            "provenance": provenance(seed),
        }
        path = folder / f"{self.name}.json"
        with atomic_write(path) as beside:
            beside.write_text(json.dumps(_finite(record), indent=2, allow_nan=False) + "\n", "utf-8")
        return path


def _finite(value: Any) -> Any:
    """With null for what JSON has no word for: NaN and infinity, as of a model that diverged."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_results(run: Path) -> list[Result]:
    """All results of a run, oldest first; of a file that is none, a warning."""
    results = []
    for path in sorted((run / _FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            record = json.loads(path.read_text("utf-8"))
            parts = [record[name] for name in ("title", "values", "columns", "rows", "note", "provenance")]
        except (ValueError, KeyError, TypeError):
            warnings.warn(f"{path}: is no result, or damaged; it is left out.", stacklevel=2)
            continue
        title, values, columns, rows, note, made = parts
        picture = path.with_suffix(".png")
        shown = picture.read_bytes() if picture.is_file() else b""
        table, of = (tuple(columns), tuple(map(tuple, rows))), record.get("model", "")
        results.append(Result(path.stem, title, values, *table, note, shown, made, of))
    return results


def page(title: str, lead: str, results: Sequence[Result]) -> str:
    """One HTML page with every result's picture, table and provenance; it refers to nothing outside."""
    sections = "\n".join(map(_section, results))
    return _PAGE.format(title=html.escape(title), lead=html.escape(lead), sections=sections)


def _section(result: Result) -> str:
    parts = [f"<h2>{html.escape(result.title)}</h2>"]
    if result.note:
        parts.append(f"<p>{html.escape(result.note)}</p>")
    if result.picture:
        data = base64.b64encode(result.picture).decode()
        parts.append(f'<img alt="{html.escape(result.title)}" src="data:image/png;base64,{data}">')
    if result.rows:
        parts.append(_table(result.columns, result.rows))
    made = result.provenance
    if made:
        facts = [made["command"], f"commit {made['commit']}", f"seed {made['seed']}"]
        facts += [made["hardware"].get("gpu") or made["hardware"]["cpu"]]
        facts += [f"{name} {version}" for name, version in made["packages"].items()]
        parts.append(f'<p class="made">{html.escape(" · ".join(facts))}</p>')
    return f"<section>{''.join(parts)}</section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return table if len(rows) <= _LONG else f"<details><summary>the numbers</summary>{table}</details>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #1a202c; max-width: 60rem;
         margin: 2rem auto; padding: 0 1rem; }}
  h1 {{ font-size: 1.7rem; margin-bottom: .2rem; }}
  h2 {{ font-size: 1.2rem; margin-top: 2.5rem; }}
  img {{ max-width: 100%; image-rendering: auto; }}
  table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
  th, td {{ padding: .25rem 1rem .25rem 0; text-align: left; border-bottom: 1px solid #e2e8f0; }}
  th {{ font-weight: 600; }}
  .lead {{ color: #4a5568; }}
  .made {{ color: #718096; font-size: .8rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{sections}
</body>
</html>
"""
