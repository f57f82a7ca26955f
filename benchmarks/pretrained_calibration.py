"""Calibrate the pretrained models of Omniglot on characters they were not trained on, in src/bruno/weights/.

The models were trained on all of Omniglot's training and validation characters, so the test characters are
the only unseen ones. Numbers on the test characters must not use these calibrations. The files have scores
alone: latents would reveal the drawings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import bruno
from bruno.data import load_examples
from bruno.tasks import GroupCalibration, Groups, fixed_cutoffs
from bruno.weights import pretrained_calibration_path, pretrained_names

_GROUPS = 50  # test characters, from all alphabets
_OTHER = 40  # training characters, to fix the cutoffs on


def calibration(name: str, data_dir: Path | None, seed: int = 0) -> GroupCalibration:
    """The calibration of a pretrained model, without latents."""
    model, generator = bruno.pretrained(name), torch.Generator().manual_seed(seed)
    parts = []
    for split, count in (("trainval", _OTHER), ("test", _GROUPS)):
        examples = load_examples("omniglot", split, data_dir=data_dir)
        places = torch.linspace(0, len(examples.names) - 1, count).long().tolist()
        parts.append(Groups.of(model, examples.of_classes(places), generator=generator))
    other, groups = parts
    data = f"{_GROUPS} of Omniglot's test characters, which {name} was not trained on"
    cutoffs = fixed_cutoffs(model, other)
    return GroupCalibration(model, groups, cutoffs, float("-inf"), data, True, seed).of_scores_alone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    of_omniglot = [name for name in pretrained_names() if name.startswith("omniglot")]
    parser.add_argument("names", nargs="*", default=of_omniglot)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    for name in arguments.names:
        path = pretrained_calibration_path(name)
        path.parent.mkdir(exist_ok=True)
        calibration(name, arguments.data_dir).save(path)
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
