"""Time of a training step, and the fraction of it that is spent outside the networks of the couplings.

On a CPU, every network is replaced by a trivial one, to time the rest: data, preprocessing, couplings and
process. The optimiser is timed separately. On a GPU, eager steps are compared with steps captured as one CUDA
graph; `--couplings` compares splines with affine couplings instead. All times are medians; all ratios are
within one run. Run with `make bench`. `--profile PRESET` lists the operations, or the kernels of a GPU, that
a step of a preset spends its time in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bruno import Bruno
from bruno.config import Recipe, TrainConfig, load_recipe
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.flow import Coupling, networks
from bruno.provenance import provenance
from bruno.training.schedule import make_optimiser
from bruno.training.trainer import Trainer

RESULTS = Path(__file__).parents[1] / "results"
SPLINES = ["flow.coupling=spline"]
COUPLINGS = {  # settings of the preset omniglot-density
    "affine": ["flow.coupling=affine"],
    "splines in the first scale": [*SPLINES, "flow.spline_scales=1"],
    "splines in all convolutional couplings": [*SPLINES, "flow.spline_scales=0"],
}
PROTOTYPE = ["flow.squeeze_first=true", "flow.blocks=4", "flow.units=512", "train.optimiser=adamw"]


class Echo(nn.Module):
    """The cheapest network of a coupling: its scaled input, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        scaled = x * self.scale
        return torch.cat([scaled, scaled], 1)


def trainer(
    recipe: Recipe, device: str = "cpu", *, networks: bool = True, size: int = 28, **settings: Any
) -> Trainer:
    """A trainer on random images; without `networks`, trivial ones replace those of the couplings."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2000, 1, size, size), dtype=torch.uint8)
    examples = Examples(images, torch.arange(2000) // 20, tuple(map(str, range(100))))
    model = Bruno.from_config(recipe.model((1, 28, 28), 256))
    if not networks:
        for coupling in model.modules():
            if isinstance(coupling, Coupling):
                coupling.network = Echo()
    sampler = SetSampler(examples, rotations=recipe.data.rotations, device=device)
    return Trainer(model.to(device), sampler, evolve(recipe.train, **settings))


def seconds(run: Callable[[], Any], times: int) -> float:
    run()
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def optimiser_seconds(model: Bruno, config: TrainConfig, times: int) -> float:
    """Seconds for the gradient norm and an optimiser step over all parameters."""
    optimiser = make_optimiser(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def step() -> None:
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimiser.step()

    return seconds(step, times)


def fractions_on_cpu(name: str, batch: int, times: int) -> dict[str, Any]:
    """Times of a step and of an evaluation, and the fraction of each outside the networks."""
    recipe = load_recipe(name)
    whole, rest = (trainer(recipe, networks=flag, batch=batch) for flag in (True, False))
    x = whole.sampler.sets(batch, recipe.train.set_size, whole.generator)
    step, rest_of_step = seconds(whole.step, times), seconds(rest.step, 5 * times)
    optimiser = optimiser_seconds(whole.model, recipe.train, 5 * times)
    with torch.no_grad():
        evaluation = seconds(lambda: whole.model.log_prob(x, whole.generator), times)
        rest_of_evaluation = seconds(lambda: rest.model.log_prob(x, rest.generator), 5 * times)
    return {
        "preset": name,
        "batch": batch,
        "step": step,
        "not in networks": (rest_of_step + optimiser) / step,
        "optimiser": optimiser / step,
        "evaluation": evaluation,
        "not in networks, evaluation": rest_of_evaluation / evaluation,
        "images per second": batch * recipe.train.set_size / step,
    }


def choices_on_cpu(times: int) -> list[dict[str, Any]]:
    """Time of a step by threads, memory format and optimiser, relative to the defaults."""
    rows = []
    all_threads = torch.get_num_threads()
    for name, batch in (("omniglot-paper", 2), ("omniglot-density", 4), ("mnist-dense", 32)):
        recipe = load_recipe(name)
        default = seconds(trainer(recipe, batch=batch).step, times)

        def compare(choice: str, taken: float, name: str = name, default: float = default) -> None:
            rows.append({"preset": name, "choice": choice, "times the default": taken / default})

        for threads in {1, all_threads, 2 * all_threads} - {all_threads}:
            torch.set_num_threads(threads)
            compare(
                f"{threads} threads, not {all_threads}", seconds(trainer(recipe, batch=batch).step, times)
            )
        torch.set_num_threads(all_threads)
        if recipe.flow.kind == "conv":
            networks.MEMORY_FORMAT = torch.contiguous_format
            compare("channels first, not last", seconds(trainer(recipe, batch=batch).step, times))
            networks.MEMORY_FORMAT = torch.channels_last
        model = Bruno.from_config(recipe.model((1, 28, 28), 256))
        groups = list(model.parameters())
        for p in groups:
            p.grad = torch.randn_like(p)
        fused = seconds(torch.optim.AdamW(groups, fused=True).step, 5 * times)
        for kind in ("foreach", "for-loop"):
            other = torch.optim.AdamW(groups, foreach=kind == "foreach", fused=False)
            rows.append(
                {"preset": name, "choice": f"AdamW {kind}, not fused; optimiser step only"}
                | {"times the default": seconds(other.step, 5 * times) / fused}
            )
    return rows


def speed_on_gpu(name: str, preset: str, overrides: list[str], batch: int) -> dict[str, Any]:
    """Seconds for the first 5 steps, then milliseconds per step and images per second."""
    torch.cuda.reset_peak_memory_stats()
    recipe = load_recipe(preset, overrides)
    current = trainer(recipe, "cuda", batch=batch)
    begun = time.perf_counter()
    current.advance(5)
    first = time.perf_counter() - begun
    steps = 30 if recipe.train.graph else 5
    taken = seconds(lambda: current.advance(steps), 5) / steps  # returns once the last step's result is read
    return {
        "what": name,
        "batch": batch,
        "seconds until warm": first,
        "milliseconds a step": 1000 * taken,
        "images per second": batch * recipe.train.set_size / taken,
        "peak memory, GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def gpu_rows() -> list[dict[str, Any]]:
    rows = []
    for model, preset, overrides, batches in (
        ("squeeze-first, 4 blocks, 512 units", "omniglot-density", PROTOTYPE, (32, 128)),
        ("the paper's model", "omniglot-paper", [], (32,)),
    ):
        for batch in batches:
            for mode, settings in (
                ("eager", ["train.graph=false", "train.precision=float32"]),
                ("graph", ["train.precision=float32"]),
                ("graph, networks in bfloat16", []),
            ):
                if mode != "eager" or batch == 32:
                    rows.append(speed_on_gpu(f"{model}: {mode}", preset, overrides + settings, batch))
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def coupling_rows() -> list[dict[str, Any]]:
    """Speed with splines, relative to affine couplings."""
    rows: list[dict[str, Any]] = []
    for name, settings in COUPLINGS.items():
        row = speed_on_gpu(name, "omniglot-density", settings, 32)
        affine = rows[0] if rows else row
        rows.append(
            {**row, "times the affine step": row["milliseconds a step"] / affine["milliseconds a step"]}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def cpu_tables(times: int, tiny: bool) -> dict[str, list[dict[str, Any]]]:
    if tiny:
        return {"shares": [fractions_on_cpu("mnist-dense", 2, 1)]}
    shares = [fractions_on_cpu("omniglot-paper", 2, times), fractions_on_cpu("mnist-dense", 32, 3 * times)]
    return {"shares": shares, "choices": choices_on_cpu(times)}


def profile(preset: str, steps: int) -> dict[str, Any]:
    """Where a step of a preset spends its time: the slowest kernels, or operations on a CPU."""
    recipe, gpu = load_recipe(preset), torch.cuda.is_available()
    current = trainer(recipe, "cuda" if gpu else "cpu", size=105 if recipe.data.original else 28)
    late = 0.99  # of the run, where the cross-entropy counts and augmentation has faded
    current.advance(10 if gpu else 1, late)
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    taken = seconds(lambda: current.advance(steps, late), 3) / steps
    with torch.profiler.profile(activities=[activity]) as profiled:
        current.advance(steps, late)
    own = "self_device_time_total" if gpu else "self_cpu_time_total"  # microseconds
    found = sorted(profiled.key_averages(), key=lambda event: -getattr(event, own))
    total = sum(getattr(event, own) for event in found) / 1000 / steps
    return {
        "preset": preset,
        "milliseconds a step": 1000 * taken,
        "milliseconds of kernels": total,
        "kernels a step": sum(event.count for event in found) / steps,
        "slowest": [
            {
                "kernel": event.key[:100],
                "calls a step": event.count / steps,
                "milliseconds a step": getattr(event, own) / 1000 / steps,
            }
            for event in found[:60]
        ],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, a single small measurement")
    parser.add_argument("--times", type=int, default=3, help="timed repetitions of a step on the CPU")
    parser.add_argument("--couplings", action="store_true", help="on a GPU, only compare couplings")
    parser.add_argument("--profile", metavar="PRESET", help="only profile the steps of a preset")
    arguments = parser.parse_args()
    if arguments.profile:
        found = profile(arguments.profile, 20 if torch.cuda.is_available() else 1)
        show(found["slowest"])
        path = arguments.out / f"profile-{Path(arguments.profile).stem}.json"
        path.write_text(json.dumps({**found, "provenance": provenance(0)}, indent=2) + "\n")
        return
    gpu = torch.cuda.is_available()
    name = f"training-{'cuda' if gpu else 'cpu'}"
    if arguments.couplings:
        name, tables = f"{name}-couplings", {"couplings": coupling_rows()}
    else:
        tables = {"steps": gpu_rows()} if gpu else cpu_tables(arguments.times, arguments.tiny)
    for rows in tables.values():
        show(rows)
    report = {**tables, "provenance": provenance(0)}
    (arguments.out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
