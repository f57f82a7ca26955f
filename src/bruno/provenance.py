"""Where a number in results/ comes from: command, commit, seed, hardware and versions."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("bruno", "torch", "numpy")


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Command, commit, seed, hardware and versions, ready for JSON."""
    return {
        "command": _command(),
        "commit": _commit(),
        "seed": seed,
        "hardware": _hardware(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _command() -> str:
    script = Path(sys.argv[0])
    name = f"python {script.name}"
    if script.name in ("__main__.py", "bruno"):
        name = "bruno"
    elif script.is_file() and script.resolve().is_relative_to(Path.cwd()):
        name = f"python {script.resolve().relative_to(Path.cwd())}"
    return " ".join([name, *map(shlex.quote, sys.argv[1:])])


def _commit() -> str | None:
    """$BRUNO_COMMIT, or the commit of the source tree with a + if it was changed; None outside a checkout."""
    return os.environ.get("BRUNO_COMMIT") or _commit_of(Path(__file__))  # set for a copy without its history


@cache  # the source that runs is that of the start, even if a commit follows
def _commit_of(source: Path) -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.check_output(command, cwd=source.parent, text=True, stderr=subprocess.DEVNULL)

    try:
        # Fails if the package is installed within a checkout of something else.
        git("ls-files", "--error-unmatch", source.name)
        commit, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed else "")


def _hardware() -> dict[str, Any]:
    facts: dict[str, Any] = {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
