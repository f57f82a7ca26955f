import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_model import MODELS, elements, trained

import bruno
from bruno import Bruno, FlowConfig, ModelConfig, known_models
from bruno.checkpoint import load_with_metadata, read, read_about, write
from bruno.config import from_dict
from bruno.flow.networks import WeightNormed
from bruno.weights import pretrained_names


@pytest.mark.parametrize("name", MODELS)
def test_a_model_survives_saving_and_loading(name, tmp_path):
    model = trained(MODELS[name]).float()
    x = elements(model, 2, 4)
    bruno.save(model, tmp_path / "model.safetensors")
    again = bruno.load(tmp_path / "model.safetensors")
    assert isinstance(again, Bruno)
    assert again.config == model.config
    assert again.fingerprint() == model.fingerprint()
    x = x.float() if not model.levels else x
    assert torch.equal(again.log_prob(x), model.log_prob(x))


def test_a_float64_model_stays_float64(tmp_path):
    model = trained(MODELS["dense image"])
    bruno.save(model, tmp_path / "model")
    again = bruno.load(tmp_path / "model")
    assert again.fingerprint() == model.fingerprint()
    bruno.save(model.prior(), tmp_path / "posterior")
    assert bruno.load(tmp_path / "posterior", model=again).evidence.count == 0


@pytest.mark.parametrize("half", [False, True])
def test_gaussianised_pixels_keep_their_precision(tmp_path, half):
    config = ModelConfig((1, 4, 4), pixels="gaussianise", flow=FlowConfig(blocks=1, filters=4, units=8))
    model = Bruno.from_config(config)
    model.initialise(elements(model, 20))
    if half:  # round the weights first
        model.load_state_dict(
            {n: t.half() if n.startswith("flow.") else t for n, t in model.state_dict().items()}
        )
    bruno.save(model, tmp_path / "model", half=half)
    again = bruno.load(tmp_path / "model")
    assert again.preprocessing.shares.dtype == torch.double
    assert {p.dtype for p in again.parameters()} == {torch.float}
    assert again.fingerprint() == model.fingerprint()
    x = elements(model, 2, 4)
    assert torch.equal(again.log_prob(x), model.log_prob(x))


def test_loading_does_not_initialise_again(tmp_path):
    model = Bruno.from_config(MODELS["8×8"])
    x = elements(model, 20)
    model.initialise(x)
    bruno.save(model, tmp_path / "model")
    again = bruno.load(tmp_path / "model")
    again.initialise(x // 5)
    assert again.fingerprint() == model.fingerprint()


def test_a_posterior_file_is_small_and_can_be_loaded(tmp_path):
    model = trained(MODELS["28×28"]).float()
    posterior = model.condition(elements(model, 3, 6))
    bruno.save(posterior, tmp_path / "posterior")
    assert (tmp_path / "posterior").stat().st_size < 3 * 2 * 784 * 8 + 2000
    again = bruno.load(tmp_path / "posterior", model=model)
    query = elements(model, 3)
    assert torch.equal(again.log_prob(query), posterior.log_prob(query))
    merged = again.merge(model.condition(elements(model, 3, 2)))
    assert merged.evidence.count.tolist() == [8, 8, 8]


def test_one_set_of_one_column_can_be_saved(tmp_path):
    model = Bruno.from_config(ModelConfig((1,), levels=0, flow=FlowConfig("dense")))
    model.initialise(torch.randn(20, 1))
    bruno.save(model, tmp_path / "model")
    again = bruno.load(tmp_path / "model")
    assert again.fingerprint() == model.fingerprint()
    bruno.save(model.condition(torch.randn(1, 5, 1)), tmp_path / "posterior")
    assert bruno.load(tmp_path / "posterior", model=again).evidence.count.tolist() == [5]


def test_a_loaded_model_keeps_no_graph(tmp_path):
    model = trained(MODELS["28×28"]).float()
    bruno.save(model, tmp_path / "model")
    posterior = bruno.load(tmp_path / "model").prior()
    for x in elements(model, 3):
        posterior = posterior.update(x)
    assert not posterior.evidence.mean.requires_grad
    assert posterior.score(elements(model, 2)).numpy().shape == (2,)
    assert repr(posterior) == "Posterior(batch_shape=(), seen=3)"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model = trained(MODELS["dense image"])
    path = tmp_path / "model"
    bruno.save(model, path)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("bruno.checkpoint.save_file", full)
    with pytest.raises(OSError, match=r"No space"):
        bruno.save(trained(MODELS["dense image"]), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("without_shape_checks")
class TestMistakes:
    def test_a_missing_or_foreign_file_is_rejected(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"`path` .* does not exist"):
            bruno.load(tmp_path / "nothing")
        (tmp_path / "text").write_text("hello, hello, hello")
        with pytest.raises(ValueError, match=r"must be a file that bruno.save wrote"):
            bruno.load(tmp_path / "text")

    def test_a_truncated_file_is_rejected(self, tmp_path):
        bruno.save(trained(MODELS["dense image"]), tmp_path / "model")
        whole = (tmp_path / "model").read_bytes()
        (tmp_path / "model").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"must be a file that bruno.save wrote"):
            bruno.load(tmp_path / "model")

    def test_a_posterior_needs_its_own_model(self, tmp_path):
        model = trained(MODELS["dense image"])
        bruno.save(model.prior(), tmp_path / "posterior")
        known_models._alive.clear()  # as in another process
        with pytest.raises(ValueError, match=r"`model` must be given"):
            bruno.load(tmp_path / "posterior")
        with pytest.raises(ValueError, match=r"must be the one that made the posterior"):
            bruno.load(tmp_path / "posterior", model=trained(MODELS["dense image"]))

    def test_a_model_file_is_not_loaded_as_a_posterior(self, tmp_path):
        model = trained(MODELS["28×28"]).float()
        bruno.save(model, tmp_path / "model")
        with pytest.raises(ValueError, match="`model` must be omitted"):
            bruno.load(tmp_path / "model", model=model)

    @pytest.mark.parametrize("settings", [{"half": True}, {"int8": True}, {"about": {"a": 1}}])
    def test_settings_of_models_are_rejected_for_posteriors(self, tmp_path, settings):
        posterior = trained(MODELS["dense image"]).prior()
        with pytest.raises(ValueError, match=rf"posterior.* omit `{next(iter(settings))}`"):
            bruno.save(posterior, tmp_path / "posterior", **settings)
        assert not list(tmp_path.iterdir())

    def test_a_model_with_a_custom_flow_cannot_be_saved(self, tmp_path):
        model = trained(MODELS["dense image"])
        model.config = None
        with pytest.raises(ValueError, match=r"built from a config"):
            bruno.save(model, tmp_path / "model")
        with pytest.raises(TypeError, match=r"must be a Bruno or a Posterior; got int"):
            bruno.save(3, tmp_path / "model")


def test_half_precision_halves_the_file_and_loads_as_float32(tmp_path):
    model = Bruno.from_config(ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=256)))
    x = torch.randint(0, 256, (40, 1, 8, 8))
    model.initialise(x)
    bruno.save(model, tmp_path / "whole")
    bruno.save(model, tmp_path / "half", half=True, about={"seed": 3})
    assert (tmp_path / "half").stat().st_size < 0.55 * (tmp_path / "whole").stat().st_size
    half = bruno.load(tmp_path / "half")
    assert all(p.dtype == torch.float32 for p in half.parameters())
    assert torch.equal(half.process.correlation, model.process.correlation)
    torch.testing.assert_close(half.encode(x).z, model.encode(x).z, rtol=0.01, atol=0.01)
    assert read_about(tmp_path / "half") == {"seed": 3}
    assert read_about(tmp_path / "whole") == {}


def weight_normed(units: int = 256, weight_norm: bool = True) -> Bruno:
    flow = FlowConfig("dense", couplings=2, units=units, weight_norm=weight_norm)
    model = Bruno.from_config(ModelConfig((1, 8, 8), flow=flow))
    model.initialise(torch.randint(0, 256, (40, 1, 8, 8)))
    for p in model.flow.parameters():
        p.data.add_(0.02 * torch.randn_like(p))
    return model


def test_weights_in_8_bits_quarter_the_file_and_hardly_change_the_model(tmp_path):
    model, x = weight_normed(), torch.randint(0, 256, (40, 1, 8, 8))
    bruno.save(model, tmp_path / "whole")
    bruno.save(model, tmp_path / "int8", int8=True, about={"seed": 3})
    assert (tmp_path / "int8").stat().st_size < 0.3 * (tmp_path / "whole").stat().st_size
    small = bruno.load(tmp_path / "int8")
    assert all(p.dtype == torch.float32 for p in small.parameters())
    assert read_about(tmp_path / "int8") == {"seed": 3}
    z = model.encode(x).z
    error, rounded = ((m.encode(x).z - z).square().mean().sqrt() for m in (small, model))
    assert 0 < error < 0.02 * z.std()
    assert rounded == 0
    bruno.save(small, tmp_path / "again", int8=True)  # rounding twice is rounding once
    torch.testing.assert_close(bruno.load(tmp_path / "again").encode(x).z, small.encode(x).z)


def test_directions_from_8_bits_are_as_long_as_those_of_a_new_layer(tmp_path):
    # Adam moves every number by about the learning rate: a direction of length 1,000 would hardly turn.
    bruno.save(weight_normed(), tmp_path / "int8", int8=True)
    for layer in bruno.load(tmp_path / "int8").modules():
        if isinstance(layer, WeightNormed):
            lengths = layer.direction.flatten(1).norm(dim=1)
            torch.testing.assert_close(lengths, layer.magnitude.flatten().abs(), rtol=1e-3, atol=1e-6)


def test_without_weight_norm_8_bits_are_16(tmp_path):
    model, x = weight_normed(weight_norm=False), torch.randint(0, 256, (40, 1, 8, 8))
    bruno.save(model, tmp_path / "int8", int8=True)
    bruno.save(model, tmp_path / "half", half=True)
    loaded = [bruno.load(tmp_path / name).encode(x).z for name in ("int8", "half")]
    assert torch.equal(*loaded)


@pytest.mark.parametrize("name", ["bound", "magnitude", "direction"])
def test_integers_in_the_place_of_other_weights_are_rejected(tmp_path, name):
    bruno.save(weight_normed(units=8), tmp_path / "model", int8=True)
    tensors, header = read(tmp_path / "model", "cpu")
    whole = next(n for n in tensors if n.endswith(f".{name}"))
    short = tensors[whole][:, :1] if name == "direction" else tensors[whole].to(torch.int8)
    write(tmp_path / "model", {**tensors, whole: short.contiguous()}, header)
    with pytest.raises(ValueError, match=r"must hold the weights of its config"):
        bruno.load(tmp_path / "model")


def test_a_model_and_its_metadata_are_read_once(tmp_path, monkeypatch):
    model = trained(MODELS["dense image"])
    bruno.save(model, tmp_path / "model", about={"seed": 3})
    reads = []
    monkeypatch.setattr("bruno.checkpoint.safe_open", lambda *a, **k: reads.append(a) or safe_open(*a, **k))
    loaded, about = load_with_metadata(tmp_path / "model")
    assert loaded.fingerprint() == model.fingerprint()
    assert about == read_about(tmp_path / "model") == {"seed": 3}
    assert len(reads) == 2  # one for each function


def test_pretrained_models_are_loaded_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("bruno.weights._WEIGHTS", tmp_path)
    model = Bruno.from_config(ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=8)))
    bruno.save(model, tmp_path / "tiny.safetensors")
    assert pretrained_names() == ("tiny",)
    assert bruno.pretrained("tiny").fingerprint() == model.fingerprint()
    with pytest.raises(ValueError, match=r"`name` must be .*tiny; got 'tinny'"):
        bruno.pretrained("tinny")


def test_a_model_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_text("")
    model = Bruno.from_config(ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=8)))
    bruno.save(model, tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_tensors_in_any_order_of_memory_are_written(tmp_path):
    turned = torch.arange(6.0).view(2, 3).T
    write(tmp_path / "file", {"turned": turned}, {"kind": "index"})
    assert torch.equal(read(tmp_path / "file", "cpu")[0]["turned"], turned)


@pytest.mark.parametrize(
    ("before", "after"), [(b"raw_dof", b"raw_dog"), (b'alpha\\": 0.001', b'alpha\\": 0.101')]
)
def test_damaged_names_and_settings_are_detected(tmp_path, before, after):
    flow = FlowConfig("dense", couplings=2, units=8)
    model = Bruno.from_config(ModelConfig((1, 8, 8), alpha=0.001, flow=flow))
    bruno.save(model, tmp_path / "model")
    content = (tmp_path / "model").read_bytes()
    assert content.count(before) == 1
    (tmp_path / "model").write_bytes(content.replace(before, after))
    with pytest.raises(ValueError, match="is damaged: checksum mismatch"):
        bruno.load(tmp_path / "model")


def test_a_file_without_a_checksum_is_read_only_on_request(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "old", {"bruno": json.dumps({"format": 1, "kind": "other"})})
    with pytest.raises(ValueError, match=r"`path` must have a checksum; .*old .*unchecked=True"):
        read(tmp_path / "old", "cpu")
    tensors, header = read(tmp_path / "old", "cpu", unchecked=True)
    assert header["kind"] == "other"
    assert torch.equal(tensors["x"], torch.ones(2))


TINY = {"shape": [2], "levels": 0, "flow": {"kind": "dense", "couplings": 2, "units": 4}}
HEADERS = [
    "[]", "3", '"text"', "null", "[" * 100_000, "{}", '{"format": 1}', '{"format": 1, "kind": []}',
    '{"format": 1, "kind": "model", "checksum of all": "x"}',
    '{"format": 1, "kind": "model", "checksum": []}',
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:20])
def test_an_odd_header_is_an_error_that_names_the_file(tmp_path, header):
    save_file({"x": torch.ones(2)}, tmp_path / "odd", {"bruno": header})
    with pytest.raises(ValueError, match=r"`path` .*odd"):
        bruno.load(tmp_path / "odd")


@pytest.mark.parametrize(
    ("tensors", "header"),
    [
        ({}, {"kind": "model"}),
        ({}, {"kind": "model", "config": 3}),
        ({}, {"kind": "model", "config": TINY}),
        ({}, {"kind": "model", "config": {**TINY, "shape": [10**6] * 3}}),
        ({"process.mean": torch.zeros(2, dtype=torch.int32)}, {"kind": "model", "config": TINY}),
        ({}, {"kind": "posterior"}),
        ({}, {"kind": "other"}),
    ],
)
def test_a_model_file_with_other_contents_is_an_error(tmp_path, tensors, header):
    write(tmp_path / "odd", tensors, header)
    with pytest.raises(ValueError, match=r"must|the limit is"):
        bruno.load(tmp_path / "odd")


def test_weights_of_another_shape_are_named(tmp_path):
    model = Bruno.from_config(from_dict(ModelConfig, TINY))
    weights = {**model.state_dict(), "process.mean": torch.zeros(3)}
    write(tmp_path / "odd", weights, {"kind": "model", "config": TINY})
    with pytest.raises(ValueError, match=r"odd: .*'process.mean'"):
        bruno.load(tmp_path / "odd")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mean": torch.tensor([0.0, math.nan])}, "`mean` .*got nan"),
        ({"scatter": torch.tensor([math.inf, 0.0])}, "`scatter` .*got inf"),
        ({"scatter": torch.tensor([-1.0, 0.0])}, "`scatter` .*got -1"),
        ({"count": torch.tensor(-3)}, "`count` .*got -3"),
        ({"count": torch.tensor(1.5)}, "`count` .*got torch.float32"),
        ({"count": torch.tensor([1, 2])}, r"`mean` .*\(2, 2\); got .*\(2,\)"),
        ({"count": torch.tensor(0)}, "`count` .*above 0.*got 0"),
        ({"mean": torch.zeros(3)}, r"`mean` .*\(2,\); got .*\(3,\)"),
    ],
)
def test_a_state_that_no_set_can_have_is_an_error(tmp_path, changed, message):
    model = Bruno.from_config(from_dict(ModelConfig, TINY))
    tensors = {"count": torch.tensor(2), "mean": torch.ones(2), "scatter": torch.ones(2), **changed}
    write(tmp_path / "state", tensors, {"kind": "posterior", "model": model.fingerprint()})
    with pytest.raises(ValueError, match=rf"state: .*{message}"):
        bruno.load(tmp_path / "state", model=model)
