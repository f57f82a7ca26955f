"""Where to compute: the device with a given name, and the process group that torchrun starts."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator

import torch
import torch.distributed.nn  # before a group exists: its functions would keep the group they see at import
from torch import distributed


def resolve_device(name: str) -> str:
    """The device called "auto", "cpu", "cuda" or "cuda:NUMBER"; auto is a GPU if one is available.

    A process that torchrun started gets the GPU of its local rank.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"`device` must be auto, cpu, cuda or cuda:NUMBER; got {name!r}.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= count:
        found = f"the last GPU is cuda:{count - 1}" if count else "no GPU was found. Use cpu"
        raise ValueError(f"`device` must be available; got {name}, and {found}.")
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{_environment_number('LOCAL_RANK')}"
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)  # streams and graphs are created on the current device
    return name


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the process group of torchrun, if it started this process, and leave it at the end.

    Gloo's threads end with the last reference to the group. A thread that still releases a tensor when the
    interpreter exits aborts the process, so reference cycles are garbage-collected here.
    """
    if "LOCAL_RANK" not in os.environ or distributed.is_initialized():
        yield
        return
    _check_torchrun()
    # NCCL's watchdog must not query a stream while a step is captured there.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()
        gc.collect()


def _check_torchrun() -> None:
    """Raise unless the variables of torchrun are valid, as a process might wait forever for missing ones."""
    _environment_number("LOCAL_RANK")
    rank, processes = _environment_number("RANK"), _environment_number("WORLD_SIZE")
    if rank >= processes:
        raise ValueError(
            f"`RANK` must be below WORLD_SIZE, {processes}; got {rank}. Unset LOCAL_RANK to train in one "
            "process."
        )
    if _environment_number("MASTER_PORT") >= 2**16 or not os.environ.get("MASTER_ADDR"):
        raise ValueError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be an address and a port, as torchrun sets them; got "
            f"{os.environ.get('MASTER_ADDR', '')!r} and {os.environ['MASTER_PORT']}."
        )


def _environment_number(variable: str) -> int:
    """A number that torchrun set."""
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"`{variable}` must be a whole number, as torchrun sets it; got {text!r}. Unset LOCAL_RANK to "
            "train in one process."
        )
    return int(text)
