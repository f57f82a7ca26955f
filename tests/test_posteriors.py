"""Posteriors as light values: batches, devices, pickles, and the models they find again."""

import copy
import pickle
from types import SimpleNamespace

import joblib
import pytest
import torch
from torch.testing import assert_close

import bruno
from bruno import Bruno, Posterior, known_models
from bruno.config import FlowConfig, ModelConfig

SETS = torch.randn((4, 5, 3), generator=torch.Generator().manual_seed(0))


def new_model(units=64) -> Bruno:
    model = Bruno.from_config(ModelConfig((3,), levels=0, flow=FlowConfig("dense", couplings=2, units=units)))
    model.initialise(SETS)
    return model.requires_grad_(False)


@pytest.fixture
def model():
    forget_models()  # those of other tests may have the same weights
    return new_model()


def forget_models():
    """As in a new process: no model is known."""
    known_models._opened.clear()
    known_models._alive.clear()


@pytest.mark.parametrize(("device", "used"), [("cuda:0", "cuda:0"), ("cuda:3", "cpu"), ("cpu", "cpu")])
def test_a_model_is_opened_on_the_cpu_if_its_gpu_is_not_here(model, monkeypatch, device, used):
    found = []

    def opener(source, *, checkpoint, device):
        found.append(device)
        return SimpleNamespace(model=model)

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("bruno.lazy_open.opener", opener)
    assert known_models._open("model.safetensors", model.fingerprint(), device) is model
    assert found == [used]


# --- batches ---------------------------------------------------------------------------------------------


def test_a_batch_has_a_length_and_can_be_indexed_iterated_and_stacked(model):
    batch = model.condition(SETS)
    assert len(batch) == 4
    assert [int(one.evidence.count) for one in batch] == [5] * 4
    assert_close(Posterior.stack(list(batch)).evidence.mean, batch.evidence.mean)
    assert_close(batch[1:3][0].evidence.mean, batch[1].evidence.mean)


def test_the_sum_of_posteriors_is_given_all_elements(model):
    both = model.condition(SETS[0]) + model.condition(SETS[1])
    assert_close(both.evidence.mean, model.condition(SETS[:2].flatten(0, 1)).evidence.mean)
    with pytest.raises(TypeError):
        _ = both + 1


def test_one_set_has_no_length_and_is_true(model):
    assert model.prior()
    with pytest.raises(TypeError, match="length"):
        len(model.prior())


def test_posteriors_of_other_models_are_not_stacked(model):
    other = new_model(units=8)
    with pytest.raises(ValueError, match="`posteriors`"):
        Posterior.stack([model.prior(), other.prior()])
    with pytest.raises(ValueError, match=r"`posteriors` .*got none"):
        Posterior.stack([])


def test_an_element_that_was_not_added_cannot_be_removed(model):
    with pytest.raises(ValueError, match=r"`x` .*at most 0 observations, as many as were added; got 1"):
        model.prior().remove(SETS[0, 0])


def test_a_posterior_moves_with_its_model(model):
    posterior = model.condition(SETS[0])
    assert posterior.to("cpu").model is model
    moved = posterior.to("meta")
    assert moved.model.device.type == moved.evidence.mean.device.type == "meta"
    assert model.device.type == "cpu"


# --- pickles ---------------------------------------------------------------------------------------------


def test_a_pickle_names_the_model_and_finds_it_in_the_process(model):
    posterior = model.condition(SETS[0])
    text = pickle.dumps(posterior)
    assert len(text) < 1000 < len(pickle.dumps(model)) / 10
    again = pickle.loads(text)
    assert again.model is model
    assert_close(again.evidence.scatter, posterior.evidence.scatter, rtol=0, atol=0)


def test_a_set_of_a_large_batch_is_pickled_without_the_others(model):
    batch = Posterior(model, bruno.Evidence.of(torch.randn(1000, 2, 3)))
    assert len(pickle.dumps(batch[3])) < 1000


def test_copies_share_the_model(model):
    posterior = model.condition(SETS[0])
    assert copy.deepcopy(posterior).model is model
    assert copy.deepcopy([posterior])[0].evidence.count == 5


def test_a_pickle_opens_the_file_that_the_model_was_saved_to(model, tmp_path):
    bruno.save(model, tmp_path / "model.safetensors")
    expected, text = model.condition(SETS[0]).score(SETS[1]), pickle.dumps(model.condition(SETS[0]))
    forget_models()
    first, second = pickle.loads(text), pickle.loads(text)
    assert_close(first.score(SETS[1]), expected)
    assert first.model is second.model


def test_the_model_of_a_run_is_found_in_its_folder(digits_run):
    text = pickle.dumps(bruno.open(digits_run, device="cpu").model.prior())
    forget_models()
    again = pickle.loads(text)
    assert again.model.source == str(digits_run.resolve())
    assert again.sample(1).x.shape == (1, 1, 8, 8)


def test_pretrained_models_are_found_by_name():
    assert bruno.pretrained("omniglot-small").source == "omniglot-small"


def test_without_its_model_a_posterior_says_so_when_it_is_used(model, tmp_path, without_shape_checks):
    texts = {"never saved": pickle.dumps(model.condition(SETS[0]))}
    bruno.save(model, tmp_path / "model.safetensors")
    texts["does not exist"] = texts["another model"] = pickle.dumps(model.condition(SETS[0]))
    name = model.fingerprint()
    for reason, text in texts.items():
        forget_models()
        if reason == "does not exist":
            (tmp_path / "model.safetensors").unlink()
        elif reason == "another model":
            bruno.save(new_model(units=8), tmp_path / "model.safetensors")
        lost = pickle.loads(text)
        assert lost.evidence.count == 5
        assert pickle.loads(pickle.dumps(lost)).model.fingerprint() == name
        with pytest.raises(LookupError, match=rf"{name}.*{reason}.*bruno.save"):
            lost.score(SETS[1])


# --- workers ---------------------------------------------------------------------------------------------


def in_workers(tasks):
    # A function of the library: workers may be unable to import those of a test.
    scores = joblib.Parallel(n_jobs=2)(joblib.delayed(Posterior.score)(*task) for task in tasks)
    return [score.item() for score in scores]


@pytest.mark.long
def test_workers_open_the_model_of_a_posterior(model, tmp_path):
    """Of a model without a file, the parent sees the LookupError itself, not that unpickling failed."""
    row, posteriors = [[0.1, 0.2, 0.3]], list(model.condition(SETS))
    with pytest.raises(LookupError, match=r"never saved.*bruno\.save"):
        in_workers([(posterior, row) for posterior in posteriors])
    bruno.save(model, tmp_path / "model.safetensors")
    found = in_workers([(posterior, row) for posterior in posteriors])
    assert found == pytest.approx([posterior.score(row).item() for posterior in posteriors], rel=1e-4)


# --- fingerprints and files ------------------------------------------------------------------------------


def test_the_fingerprint_of_a_frozen_model_follows_its_weights(model, monkeypatch):
    before = model.fingerprint()
    calls = []
    compute = Bruno._computed_fingerprint
    monkeypatch.setattr(Bruno, "_computed_fingerprint", lambda self: calls.append(1) or compute(self))
    assert model.fingerprint() == before
    assert not calls
    with torch.no_grad():
        model.process.raw_variance.add_(0.5)
    assert model.fingerprint() != before
    assert new_model(units=64).fingerprint() not in (before, model.fingerprint())
    model.requires_grad_(True).fingerprint()
    calls.clear()
    model.fingerprint()
    assert calls


def test_a_posterior_file_is_loaded_without_its_model(model, tmp_path):
    posterior = model.condition(SETS[0])
    bruno.save(posterior, tmp_path / "posterior")
    assert bruno.load(tmp_path / "posterior").model is model
    bruno.save(model, tmp_path / "model.safetensors")
    bruno.save(posterior, tmp_path / "posterior")
    expected = posterior.score(SETS[1])
    forget_models()
    assert_close(bruno.load(tmp_path / "posterior").score(SETS[1]), expected)
    (tmp_path / "model.safetensors").unlink()
    forget_models()
    with pytest.raises(ValueError, match=r"`model` must be given.*does not exist"):
        bruno.load(tmp_path / "posterior")
