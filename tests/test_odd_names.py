"""Run folders, models and states whose names are not UTF-8."""

import os
import sys
from pathlib import Path

import pytest

import bruno

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems reject such names")


@pytest.mark.slow
def test_a_run_in_a_folder_that_is_not_utf8_is_trained_resumed_and_used(tmp_path):
    folder = tmp_path / os.fsdecode(b"run\xff\x1b\n")
    settings = {"flow": {"units": 8, "couplings": 2}, "batch": 2, "validation_sets": 2, "device": "cpu"}
    bruno.train("digits", folder, steps=1, **settings)
    bruno.train("digits", folder, steps=2, resume=True, **settings)
    trained = bruno.open(folder, device="cpu")
    model = tmp_path / os.fsdecode(b"model\xff")
    bruno.save(trained.model, model)
    assert bruno.load(model).fingerprint() == trained.model.fingerprint()
    assert all(path.is_file() for path in map(Path, trained.write_samples(prior=True).paths))
