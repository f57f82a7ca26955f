"""Speed of the process, compared with the paper's recurrence and with general linear algebra.

Every time is the median of several forward and backward passes. Each method runs in its own process: the
state of the memory allocator would otherwise carry over from one to the next. Run with `make bench`.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bruno import StudentTProcess
from bruno.provenance import provenance

DIM = 784
RESULTS = Path(__file__).parents[1] / "results"
Density = Callable[[Tensor], Tensor]


def fused(process: StudentTProcess) -> Density:
    """The method of this package."""
    return process.step_log_prob


def _recurrence(process: StudentTProcess, elements: Any, n: int) -> Tensor:
    """The recurrence of the paper, equations 12 ff., as a loop of torch operations."""
    nu, v, rho = process.dof, process.variance, process.covariance
    mu, var, beta, s, b_before = torch.zeros_like(v), v, 0.0, 0.0, 0.0
    steps = []
    for i in range(1, n + 1):
        x = elements(i - 1)
        dof = nu + i - 1
        scaled = var * (nu + beta - 2) / (dof - 2)
        log_p = torch.lgamma((dof + 1) / 2) - torch.lgamma(dof / 2)
        log_p = log_p - 0.5 * torch.log((dof - 2) * math.pi * scaled)
        log_p = log_p - (dof + 1) / 2 * torch.log1p((x - mu) ** 2 / (scaled * (dof - 2)))
        steps.append(log_p.sum(-1))
        d = rho / (v + rho * (i - 1))
        mu, var = (1 - d) * mu + d * x, (1 - d) * var + d * (v - rho)
        a = (v + rho * (i - 2)) / ((v - rho) * (v + rho * (i - 1)))
        b = -rho / ((v - rho) * (v + rho * (i - 1)))
        beta = beta + (a - b) * x**2 + b * (s + x) ** 2 - b_before * s**2
        s, b_before = s + x, b
    return torch.stack(steps, -1)


def loop(process: StudentTProcess) -> Density:
    """The recurrence with z[:, i] at step i. The gradient of each z[:, i] has the size of z: O(n²)."""
    return lambda z: _recurrence(process, lambda i: z[:, i], z.shape[1])


def unbound_loop(process: StudentTProcess) -> Density:
    """The recurrence over z.unbind(1), which avoids these large gradients."""

    def density(z: Tensor) -> Tensor:
        elements = z.unbind(1)
        return _recurrence(process, elements.__getitem__, z.shape[1])

    return density


def general(process: StudentTProcess) -> Density:
    """General linear algebra: the Cholesky factor of a covariance matrix for each dimension, O(n³)."""

    def density(z: Tensor) -> Tensor:
        n = z.shape[1]
        nu, v, rho = (p[:, None] for p in (process.dof, process.variance, process.covariance))
        K = rho[..., None] + (v - rho)[..., None] * torch.eye(n, device=z.device)
        factor = torch.linalg.cholesky(K)
        t = torch.linalg.solve_triangular(factor, z.permute(2, 1, 0), upper=False)
        spread = nu[..., None] - 2 + torch.cumsum(t**2, 1) - t**2
        dof = nu + torch.arange(n, device=z.device)
        constant = torch.lgamma((dof + 1) / 2) - torch.lgamma(dof / 2) - factor.diagonal(dim1=1, dim2=2).log()
        growth = 0.5 * (math.pi * spread).log() + (dof[..., None] + 1) / 2 * torch.log1p(t**2 / spread)
        return (constant[..., None] - growth).sum(0).T

    return density


SUBJECTS = {f.__name__: f for f in (fused, loop, unbound_loop, general)}


def measure(subject: str, batch: int, n: int, dim: int, repeats: int, device: str) -> dict[str, float]:
    """Median seconds of forward + backward in this process."""
    torch.manual_seed(0)
    process = StudentTProcess(dim).to(device)
    density = SUBJECTS[subject](process)
    z = torch.randn(batch, n, dim, device=device, requires_grad=True)
    times = []
    for _ in range(repeats + 1):
        z.grad = None
        process.zero_grad()
        _wait(device)
        begin = time.perf_counter()
        density(z).mean().backward()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(times[1:])}


def measure_captured(subject: str, batch: int, n: int) -> dict[str, float]:
    """Median seconds of forward + backward replayed as one CUDA graph, as in training."""
    torch.manual_seed(0)
    process = StudentTProcess(DIM).cuda()
    density = SUBJECTS[subject](process)
    z = torch.randn(batch, n, DIM, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            density(z).mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        density(z).mean().backward()
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(times)}


def measure_memory(batch: int, n: int, device: str) -> dict[str, float]:
    """Peak memory of a forward pass that will be differentiated, as a multiple of its input."""
    process = StudentTProcess(DIM).to(device)
    process.step_log_prob(torch.randn(2, 4, DIM, device=device))  # excludes memory that is allocated once
    z = torch.randn(batch, n, DIM, device=device, requires_grad=True)
    size = z.numel() * z.element_size()
    before = _peak_memory(device)
    _result = process.step_log_prob(z)
    return {"times_input": 1 + (_peak_memory(device) - before) / size}


def measure_scaling(n: int, device: str) -> dict[str, float]:
    """Seconds per element of one long set without gradients, and memory in addition to its input."""
    process = StudentTProcess(DIM).to(device)
    z = torch.randn(n, DIM, device=device)
    before = _peak_memory(device)
    times = []
    with torch.no_grad():
        for _ in range(max(3, 20_000 // n)):
            _wait(device)
            begin = time.perf_counter()
            process.step_log_prob(z)
            _wait(device)
            times.append(time.perf_counter() - begin)
    extra = (_peak_memory(device) - before) / 2**20
    return {"seconds": statistics.median(times) / n, "extra_MiB": extra}


def _peak_memory(device: str) -> int:
    """Peak memory so far in bytes: allocated on a GPU, resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_new_process(function: str, *arguments: Any) -> dict[str, float]:
    """The result of a function of this module, called in a new process."""
    command = [sys.executable, __file__, "--measure", json.dumps([function, *arguments])]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out", type=Path, help="the JSON file to write; results/process-DEVICE.json by default"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        function, *values = json.loads(arguments.measure)
        print(json.dumps(globals()[function](*values)))
        return
    device, console = arguments.device, Console()
    results: dict[str, Any] = {"provenance": provenance(seed=0), "speed": [], "scaling": [], "memory": []}

    table = Table(
        "batch × n × dim", "subject", "ms", "relative to ours", title=f"Forward + backward, {device}"
    )
    for batch, n, subjects in (
        (32, 20, ["fused", "loop", "unbound_loop", "general"]),
        (32, 500, ["fused", "loop", "unbound_loop", "general"]),
        (1, 5000, ["fused", "unbound_loop", "general"]),
    ):
        ours = math.nan
        for subject in subjects:
            # All dimensions would not fit into memory: some are measured, and the time is scaled up.
            dim = {20: DIM, 500: 49, 5000: 1}[n] if subject == "general" else DIM
            repeats = {20: 40, 500: 5, 5000: 3}[n] if subject == "fused" or n == 20 else 2
            seconds = in_new_process("measure", subject, batch, n, dim, repeats, device)["seconds"]
            seconds *= DIM / dim
            ours = seconds if subject == "fused" else ours
            row = {"batch": batch, "n": n, "dim": DIM, "subject": subject, "measured_dim": dim}
            results["speed"].append({**row, "seconds": seconds, "times_ours": seconds / ours})
            name = subject if dim == DIM else f"{subject} ({dim} of {DIM} dimensions)"
            table.add_row(f"{batch} × {n} × {DIM}", name, f"{seconds * 1e3:.2f}", f"{seconds / ours:.1f}")
    if device == "cuda":
        ours = math.nan
        for subject in ("fused", "unbound_loop"):
            seconds = in_new_process("measure_captured", subject, 32, 20)["seconds"]
            ours = seconds if subject == "fused" else ours
            row = {
                "batch": 32,
                "n": 20,
                "dim": DIM,
                "subject": subject,
                "measured_dim": DIM,
                "captured": True,
            }
            results["speed"].append({**row, "seconds": seconds, "times_ours": seconds / ours})
            name = f"{subject}, in a CUDA graph"
            table.add_row(f"32 × 20 × {DIM}", name, f"{seconds * 1e3:.2f}", f"{seconds / ours:.1f}")
    console.print(table)

    table = Table("n", "µs per element", "extra MiB", title=f"One set of n × {DIM}, no gradient, {device}")
    for n in (100, 1000, 10_000, 100_000, 1_000_000):
        figures = in_new_process("measure_scaling", n, device)
        results["scaling"].append({"n": n, **figures})
        table.add_row(f"{n:,}", f"{figures['seconds'] * 1e6:.2f}", f"{figures['extra_MiB']:.0f}")
    console.print(table)

    table = Table("batch × n", "times the input", title=f"Peak memory of a forward pass, {device}")
    for batch, n in ((32, 20), (32, 500), (1, 5000)):
        figures = in_new_process("measure_memory", batch, n, device)
        results["memory"].append({"batch": batch, "n": n, **figures})
        table.add_row(f"{batch} × {n}", f"{figures['times_input']:.2f}")
    console.print(table)

    out = arguments.out or RESULTS / f"process-{device}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {out.name}")


if __name__ == "__main__":
    main()
