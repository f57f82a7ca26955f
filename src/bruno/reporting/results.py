"""Results as files: JSON and PNG in a run folder."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bruno.files import atomic_write, inside, parse_json, read_regular
from bruno.provenance import provenance

_FOLDER = "results"
_PNG = b"\x89PNG"  # the first bytes of every PNG
_OUTDATED = "From an earlier checkpoint; measure again for the current one."


@dataclass(frozen=True)
class Result:
    """A measurement or a picture, with its table, note and provenance.

    Attributes:
        name: stem of its files, NAME.json and NAME.png.
        title: heading.
        values: the numbers, for programs.
        columns: header of the table.
        rows: cells of the table, as text.
        note: how to read it, in a sentence or two.
        picture: PNG bytes; empty if it has none.
        provenance: command, commit, seed, hardware and versions; set when read from a file.
        model: fingerprint of the measured model; empty if none.
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
        """Write into the results of a run folder, with config and provenance; return the JSON's path.

        Replaces an earlier result of the same name, its picture included.
        """
        folder = inside(run, _FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        picture, path = folder / f"{self.name}.png", folder / f"{self.name}.json"
        if self.picture:
            with atomic_write(picture) as file:
                file.write_bytes(self.picture)
        else:
            picture.unlink(missing_ok=True)
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
        with atomic_write(path) as file:
            file.write_text(json.dumps(finite(record), indent=2, allow_nan=False) + "\n", "utf-8")
        return path


def read_results(run: Path) -> list[Result]:
    """All results of a run folder, oldest first. Files that are not results are skipped with a warning."""
    results = []
    for path in inside(run, _FOLDER).glob("*.json"):
        try:
            inside(run, f"{_FOLDER}/{path.name}")
            results.append((path.stat().st_mtime_ns, path.name, _read(path)))
        except (OSError, ValueError) as error:
            warnings.warn(f"{path}: is not a result ({error}); skipped.", stacklevel=2)
    return [result for *_, result in sorted(results, key=lambda entry: entry[:2])]


def mark_outdated(results: Sequence[Result], fingerprints: Collection[str]) -> list[Result]:
    """Add a note to results of earlier checkpoints.

    Args:
        results: the results of a run.
        fingerprints: fingerprints of the current models of the run. If empty, nothing is marked.
    """
    if not fingerprints:
        return list(results)
    return [
        replace(result, note=f"{_OUTDATED} {result.note}".rstrip())
        if result.model and result.model not in fingerprints
        else result
        for result in results
    ]


def _read(path: Path) -> Result:
    record = parse_json(read_regular(path))
    _check(isinstance(record, dict), "the file", "an object")
    record = {"model": "", **record}  # older files lack it
    for name in ("title", "note", "model"):
        _check(isinstance(record.get(name), str), name, "text")
    for name in ("values", "provenance"):
        _check(isinstance(record.get(name), dict), name, "an object")
    columns, rows = record.get("columns"), record.get("rows")
    _check(_is_text_list(columns), "columns", "a list of strings")
    _check(isinstance(rows, list) and all(map(_is_text_list, rows)), "rows", "a list of lists of strings")
    return Result(
        path.stem,
        record["title"],
        record["values"],
        tuple(record["columns"]),
        tuple(map(tuple, record["rows"])),
        record["note"],
        _read_picture(path.with_suffix(".png")),
        record["provenance"],
        record["model"],
    )


def _read_picture(path: Path) -> bytes:
    """PNG bytes; empty without a picture. Warns about a damaged picture and returns empty bytes."""
    picture = read_regular(inside(path.parent, path.name)) if path.is_file() else b""
    if picture and not picture.startswith(_PNG):
        warnings.warn(f"{path}: is not a PNG; skipped.", stacklevel=4)
        return b""
    return picture


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _check(valid: bool, name: str, rule: str) -> None:
    if not valid:
        raise ValueError(f"{name} must be {rule}")


def finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
