"""Defects in tiles in colour of classes that a model was not trained on. Writes results/decisions/tiles.json.

The preset `images` learns 24 classes of 30 tiles for some steps, about a minute of one core. In each of
further classes, 4 tiles have a defect. Area under ROC within each class, by several scores; then the shares
of clean and of defective tiles that are flagged where four held-out classes are known, over their redraws.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bruno
from bruno import Bruno
from bruno.data import Examples
from bruno.data.synthetic_tiles import DEFECTS, simulate_tiles
from bruno.provenance import provenance
from bruno.tasks import Cutoffs, Groups, GroupScores, fixed_cutoffs
from bruno.tasks.batch_criteria import SetScale, patch_scores
from bruno.tasks.metrics import roc_auc
from bruno.tasks.planted_outliers import measure_planted_outliers
from bruno.tasks.robust_evidence import batch_scores

RESULTS = Path(__file__).parents[1] / "results" / "decisions"
RATES = (0.01, 0.05, 0.1)
_CLASSES, _TILES, _DEFECTS = 24, 30, 4
_JUDGED = 26  # tiles of a set: 4 defects and 22 clean ones, or 26 clean ones
_NEAREST = 3  # the neighbour whose distance is that of whole tiles

Judge = Callable[[torch.Tensor], torch.Tensor]


def train(folder: Path, steps: int, any_phase: bool) -> tuple[Bruno, Examples, float]:
    """A model of tiles, the classes it was trained on, and the processor time that it took."""
    examples = simulate_tiles(_CLASSES, _TILES, any_phase=any_phase).examples
    np.savez(folder / "tiles.npz", images=examples.elements.numpy(), labels=examples.labels.numpy())
    start = time.process_time()
    data = {"name": str(folder / "tiles.npz"), "colour": True, "size": 32}
    trained = bruno.train("images", folder / "run", data=data, steps=steps, device="cpu")
    return trained.model, trained.examples("train"), time.process_time() - start


def judges(model: Bruno, cutoffs: Cutoffs) -> dict[str, Judge]:
    """Scores of sets of tiles (sets, n, 3, 32, 32), lower for outliers."""

    def given_others(x: torch.Tensor) -> torch.Tensor:
        return batch_scores(model, model.latents(x), cutoffs)[0]

    def density(x: torch.Tensor) -> torch.Tensor:
        encoded = model.encode(x)
        ratio = batch_scores(model, encoded.z, cutoffs)[0]
        return ratio + model.process.log_prob(encoded.z) + encoded.log_det

    def standardised(judge: Judge) -> Judge:
        def scores(x: torch.Tensor) -> torch.Tensor:
            found = judge(x)
            return SetScale.of(found).standardised(found)

        return scores

    def whole(points: torch.Tensor) -> torch.Tensor:
        distance = torch.cdist(points, points).sort(-1).values[..., _NEAREST]
        return -distance / distance.quantile(0.5, dim=1, keepdim=True)

    return {
        "score": given_others,
        "score, standardised": standardised(given_others),
        "log p(x | set), standardised": standardised(density),
        "distance of whole tiles, latents": lambda x: whole(model.latents(x)),
        "distance of whole tiles, pixels": lambda x: whole(x.flatten(2).float()),
        "distances between patches": patch_scores,
    }


@torch.no_grad()
def measure(model: Bruno, train: Examples, classes: int, any_phase: bool, redraws: int) -> dict[str, Any]:
    """Areas, and what is flagged with four known classes."""
    generator = torch.Generator().manual_seed(0)
    cutoffs = fixed_cutoffs(model, Groups.of(model, train, generator=generator))
    found, defect = simulate_tiles(classes, _TILES, defects=_DEFECTS, any_phase=any_phase, seed=300)
    x, kind = found.elements.view(classes, _TILES, 3, 32, 32), defect.view(classes, _TILES)
    faulty, clean = x[:, :_JUDGED], x[:, _DEFECTS:]
    kind = kind[:, :_JUDGED]
    methods = {}
    for name, judge in judges(model, cutoffs).items():
        scores, of_clean = (
            torch.cat([judge(some) for some in sets.split(8)]).double() for sets in (faulty, clean)
        )
        methods[name] = _areas(scores, kind) | {"flagged": _flagged(scores, of_clean, kind, redraws)}
    planted = measure_planted_outliers(model, cutoffs, train, images=400, generator=generator)
    return {"any phase": any_phase, "classes": classes, "chosen": planted.criterion, "methods": methods}


def _areas(scores: torch.Tensor, kind: torch.Tensor) -> dict[str, Any]:
    def areas(judged: torch.Tensor) -> torch.Tensor:
        pairs = zip(scores, kind, judged, strict=True)
        return torch.stack([roc_auc(one[may] > 0, -score[may]) for score, one, may in pairs])

    every = areas(torch.ones_like(kind, dtype=torch.bool))
    by_kind = {
        name: areas((kind == 0) | (kind == place)).mean().item()
        for place, name in enumerate(DEFECTS[1:], start=1)
    }
    error = every.std().item() / math.sqrt(len(every))
    return {"area under ROC": every.mean().item(), "standard error": error, "by defect": by_kind}


def _flagged(
    scores: torch.Tensor, of_clean: torch.Tensor, kind: torch.Tensor, redraws: int, known: int = 4
) -> list[dict[str, float]]:
    """Shares of the tiles of other classes that are flagged, at each rate."""
    generator, shares = torch.Generator().manual_seed(0), np.zeros((redraws, len(RATES), 2))
    for redraw in range(redraws):
        order = torch.randperm(len(scores), generator=generator)
        own, new = order[:known], order[known:]
        groups = GroupScores.of(torch.tensor([_JUDGED - 1]), of_clean[own].unsqueeze(0), known * _TILES)
        for place, rate in enumerate(RATES):
            limit = groups.threshold(_JUDGED - 1, rate)
            shares[redraw, place, 0] = (of_clean[new] < limit).double().mean()
            shares[redraw, place, 1] = (scores[new][kind[new] > 0] < limit).double().mean()
    means = shares.mean(0).tolist()
    return [
        {"asked": rate, "clean": clean, "defects": defects}
        for rate, (clean, defects) in zip(RATES, means, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--redraws", type=int, default=100)
    arguments = parser.parse_args()
    source, tables = provenance(0), []
    for any_phase in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            model, examples, seconds = train(Path(folder), arguments.steps, any_phase)
            table = measure(model, examples, arguments.classes, any_phase, arguments.redraws)
        tables.append(table | {"steps": arguments.steps, "processor seconds of training": seconds})
        print(json.dumps(tables[-1]), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"tiles": tables, "provenance": source}
    (arguments.out / "tiles.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
