"""Run by test_distributed.py in each process of torchrun: trains, and writes a report to RANK.json."""

import json
import os
import sys
from pathlib import Path

import bruno
from bruno.devices import process_group

FLOW = {"units": 16, "couplings": 2}
EPISODES = {"discriminative": 0.1, "episodes": 2, "way": 3}
TRAIN = {
    "batch": 4,
    "ema": 0.9,
    "dropout": 0.1,
    "decay": "none",
    "warmup": 0.0,
    **EPISODES,
}  # the same for any number of steps
SETTINGS = {"device": "cpu", "validation_sets": 6, "flow": FLOW, **TRAIN}


def error_of(**settings) -> str:
    try:
        bruno.train("digits", **{**SETTINGS, **settings})
    except ValueError as error:
        return str(error)
    return ""


def train_and_fail() -> dict:
    bruno.train("digits", "run", steps=4, **SETTINGS)
    run = bruno.train("digits", "run", steps=8, resume=True, **SETTINGS)
    tuned = bruno.finetune(run, "tuned", steps=2, way=3, trials=0)
    return {
        "errors": [error_of(out="other", batch=5), error_of(out="run", steps=8)],
        "models": [model.fingerprint() for model in (run.model, tuned.trained.model)],
    }


if __name__ == "__main__":
    with process_group("cpu"):  # one for all trainings: torchrun's processes can form a group only once
        found = train_and_fail()
    found["threads"] = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
