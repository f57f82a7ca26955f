"""Tasks accept numpy arrays, lists and PIL images, and give the same results as for tensors."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import bruno.tasks
from bruno import Bruno, FlowConfig, ModelConfig
from bruno.tasks.analysis import toy_comparison
from bruno.tasks.anomaly import judge_batch, leave_one_out_scores, online_scores
from bruno.tasks.classification import classify
from bruno.tasks.detector import Detector
from bruno.tasks.explanation import explain
from bruno.tasks.familiarity import Familiarity
from bruno.tasks.generation import samples_by_prefix, spread_by_repeats
from bruno.tasks.index import Index
from bruno.tasks.metrics import (
    average_precision,
    calibration_error,
    log_loss,
    mean_and_error,
    precision_at_k,
    roc_auc,
)
from bruno.tasks.retrieval import rank
from bruno.tasks.robust_evidence import Cutoffs, typical_elements
from bruno.tasks.specks import has_speck
from bruno.tasks.temperature import best_temperature

IMAGES = torch.randint(0, 256, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

CONVERSIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "list of numpy arrays": lambda x: list(x.numpy()),
    "list of tensors": list,
    "list of PIL images": lambda x: [Image.fromarray(image[0].numpy()) for image in x],
}

TASKS: dict[str, Callable[[Bruno, Any], Any]] = {
    "online scores": online_scores,
    "leave-one-out scores": leave_one_out_scores,
    "batch": lambda model, x: torch.tensor([j.score for j in judge_batch(model, x, 0.0, floor=-1e9)]),
    "stream": lambda model, x: torch.tensor([j.score for j in Detector(model, count_all=True).watch(x)]),
    "typical": lambda model, x: Detector(model, floor=-1e9).after_typical(x).evidence.mean,
    "classification": lambda model, x: classify(model, {"a": x[:2], "b": x[2:4]}, x[4:]).log_scores,
    "unnamed classes": lambda model, x: classify(model, [x[:2], x[2:4]], x[4:]).log_scores,
    "index": lambda model, x: Index.of(model, x).latents,
    "ranking": lambda model, x: rank(Index.of(model, IMAGES), model, x).scores,
    "prefixes": lambda model, x: samples_by_prefix(model, x, 1, temperature=0.0).samples.x,
    "explanation": lambda model, x: explain(model.condition(IMAGES), x, permutations=4).contributions,
    "specks": lambda model, x: has_speck(x),
    "imputation": Bruno.impute,
    "bits/dim": lambda model, x: model.bits_per_dim(model.log_prob(x).tolist()),
    "repeats": lambda model, x: spread_by_repeats(model, x, (1,), samples=2, temperature=0.0).samples.x,
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("task", TASKS)
def test_arrays_give_the_results_of_tensors(tiny_model, task, conversion):
    expected = TASKS[task](tiny_model, IMAGES)
    found = TASKS[task](tiny_model, CONVERSIONS[conversion](IMAGES))
    torch.testing.assert_close(found, expected)


LATENTS = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, list, torch.Tensor.tolist])
def test_typical_latents_are_found_in_arrays(tiny_model, convert):
    cutoffs, usable = Cutoffs((-math.inf,)), LATENTS[..., 0] < 1
    expected = typical_elements(tiny_model, LATENTS, cutoffs, usable)
    assert torch.equal(typical_elements(tiny_model, convert(LATENTS), cutoffs, convert(usable)), expected)
    assert not expected.all()


def test_every_public_task_takes_arrays_wherever_it_takes_tensors():
    functions = [getattr(bruno.tasks, name) for name in bruno.tasks.__all__]
    functions = [one for one in functions if inspect.isfunction(one)]
    functions += [Familiarity.check, Familiarity.too_bright, Index.of, Detector.watch, Detector.after_typical]
    taken = 0
    for function in functions:
        for argument in inspect.signature(function).parameters.values():
            kind = str(argument.annotation)
            if "Callable" not in kind and re.search("Tensor|Array|Numbers", kind):
                assert re.search("Array|Numbers", kind), f"{function.__qualname__}, {argument.name}: {kind}"
                taken += 1
    assert taken > 15


def test_specks_of_pil_images_are_those_of_their_pixels():
    pixels = torch.zeros(3, 1, 6, 5, dtype=torch.uint8)
    pixels[1, 0, 3, 3] = 255
    pixels[2, 0, 1:4, 1:4] = 255
    images = [Image.fromarray(image[0].numpy()) for image in pixels]
    for given in (images, [image.convert("RGB") for image in images], tuple(images)):
        assert has_speck(given).tolist() == has_speck(pixels).tolist() == [False, True, False]
        assert has_speck([given], levels=2).tolist() == [[False, True, False]]
    assert bool(has_speck(images[1]))
    with pytest.raises(ValueError, match=r"`images` .*one shape; got \(3, 6, 5\) and \(3, 5, 6\)"):
        has_speck([images[0], images[0].rotate(90, expand=True)])


def test_sets_and_rows_can_be_arrays(tiny_model):
    sets = IMAGES.view(2, 3, 1, 2, 2)
    torch.testing.assert_close(online_scores(tiny_model, sets.numpy()), online_scores(tiny_model, sets))
    model = Bruno.from_config(ModelConfig((3,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = np.random.default_rng(0).normal(size=(8, 3))
    model.initialise(rows)
    found = classify(model, [rows[:3], rows[3:6].tolist()], rows[6:])
    assert found.probabilities.shape == (2, 2)
    assert isinstance(found.queries, torch.Tensor)
    support, queries = [[[1, 2, 3]], [[4, 5, 6]]], [[1, 2, 3]]
    whole = classify(model, support, queries)
    real = classify(model, list(torch.tensor(support).double()), torch.tensor(queries).double())
    torch.testing.assert_close(whole.probabilities, real.probabilities)


TARGET, SCORE = torch.tensor([True, False, True, False]), torch.tensor([0.4, 0.1, 0.9, 0.8])
LABELS, LOG_SCORES = torch.tensor([0, 1, 1]), torch.tensor([[0.2, 0.1], [0.3, 0.9], [0.5, 0.4]])
METRICS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "area": (roc_auc, (TARGET, SCORE, SCORE + 1)),
    "average precision": (average_precision, (TARGET, SCORE)),
    "precision": (lambda target, score: precision_at_k(target, score, 2), (TARGET, SCORE)),
    "log loss": (log_loss, (LABELS, LOG_SCORES)),
    "calibration": (calibration_error, (LABELS, LOG_SCORES)),
    "temperature": (best_temperature, (LABELS, LOG_SCORES)),
    "mean": (lambda values: mean_and_error(values).error, (SCORE,)),
    "toy": (lambda z: toy_comparison(z).gaussian.mean, (SCORE,)),
    "specks": (has_speck, (IMAGES,)),
}


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_of_arrays_and_lists_equal_metrics_of_tensors(metric):
    function, arguments = METRICS[metric]
    expected = function(*arguments)
    for convert in (torch.Tensor.numpy, torch.Tensor.tolist):
        found = function(*map(convert, arguments))
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), check_dtype=False)


def test_targets_that_are_not_true_or_false_are_rejected():
    with pytest.raises(ValueError, match=r"`target` .*got torch.int64"):
        roc_auc([1, 0, 1, 0], SCORE)
