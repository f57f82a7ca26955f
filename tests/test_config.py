import math
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bruno.checks import check_at_least
from bruno.config import (
    DataConfig,
    FlowConfig,
    ModelConfig,
    ProcessConfig,
    Recipe,
    TrainConfig,
    from_dict,
    load_recipe,
    presets,
    to_dict,
)
from bruno.settings import describe, flat, parse_settings

TRAINING = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(1, 10**6),
        "learning_rate": st.floats(0, 1),
        "optimiser": st.sampled_from(["adamw", "adam", "rmsprop", "muon"]),
        "mirror": st.booleans(),
        "seed": st.integers(0, 2**63 - 1),
    },
)


@given(TRAINING, st.floats(1e-6, 0.4), st.lists(st.text(), unique=True))
def test_a_config_survives_its_dictionary(training, alpha, classes):
    data = DataConfig("digits", classes=tuple(classes))
    recipe = Recipe(data, alpha=alpha, train=TrainConfig(**training))
    values = to_dict(recipe)
    assert from_dict(Recipe, values) == recipe
    assert values["train"].items() >= training.items()


def test_a_dictionary_may_hold_lists_and_omit_defaults():
    config = from_dict(ModelConfig, {"shape": [7], "levels": 0, "flow": {"kind": "dense"}})
    assert config == ModelConfig((7,), 0, flow=FlowConfig("dense"))
    assert hash(config) == hash(ModelConfig((7,), 0, flow=FlowConfig("dense")))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": [1], "flow": {"filtres": 3}}, r"`flow.filtres` is not a setting .* `flow.filters`\?"),
        (
            {"shape": [1], "pixels": "probit"},
            "`pixels` must be 'logit' or 'gaussianise' or 'mixture'; got 'probit'",
        ),
        ({"shape": [1], "flow": {"scalez": 3}}, r"`flow.scalez` is not a setting .* `flow.scales`\?"),
        ({"shape": [1], "process": {"scales": 3}}, r"`process.scales` .* mean `scales` or `flow.scales`\?"),
        (
            {"shape": [1], "flow": {"verdict": True}},
            r"`flow.verdict` .*; the settings are bins, .* Other sections are process\.$",
        ),
        ({"shape": [1], "flow": {"bin": 3}}, r"`flow.bin` .*; did you mean `flow.bins`\?$"),
        ({"shape": [1], "xyz": 3}, "`xyz` is not a setting of ModelConfig; the settings are alpha"),
        ({"shape": [1], "flow": {"kind": "cnn"}}, "`flow.kind` must be 'conv' or 'dense'; got 'cnn'"),
        ({"shape": [1], "process": {"kind": "t"}}, "`process.kind` must be 'student-t' or 'gaussian'"),
        ({"shape": [1], "flow": {"filters": 0}}, "`flow.filters` must be at least 1; got 0"),
        (
            {"shape": [1], "flow": {"coupling": "cubic"}},
            r"`flow.coupling` .*'affine' or 'spline'; got 'cubic'",
        ),
        ({"shape": [1], "flow": {"spline_scales": 3}}, r"`flow.spline_scales` .*at most 2, .*got 3"),
        ({"shape": [1], "flow": {"spline_scales": -1}}, r"`flow.spline_scales` .*at least 0; got -1"),
        ({"shape": [1], "flow": {"bins": 1}}, r"`flow.bins` .*from 2 to 128; got 1"),
        ({"shape": [1], "flow": {"interval": 0}}, r"`flow.interval` .*above 0 .*got 0"),
        ({}, "`shape` must be given: it has no default"),
        ({"shape": 4}, r"`shape` must be a list .* or \[1, 2\]; got 4"),
        ({"shape": [4], "flow": "dense"}, "`flow` must be a section of settings; got 'dense'"),
        ({"shape": [4], "flow": {"scales": "2"}}, "`flow.scales` must be int; got '2'"),
        ({"shape": [4], "flow": {"scales": True}}, "`flow.scales` must be int; got True"),
        ({"shape": [4], "process": {"dof": "a"}}, "`process.dof` must be float or int; got 'a'"),
        ({"shape": [4], "process": {"dof": math.nan}}, "`process.dof` must be a finite number; got nan"),
        ({"shape": []}, "`shape` must be positive sizes"),
        ({"shape": [4], "levels": 1}, r"`levels` must be at least 2 .*or 0 for real numbers; got 1"),
    ],
)
def test_mistakes_name_the_setting_and_the_way_out(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(ModelConfig, values)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: TrainConfig(learning_rate=math.inf),
            "`train.learning_rate` must be a finite number; got inf",
        ),
        (lambda: TrainConfig(learning_rate=-1.0), "`train.learning_rate` must be at least 0; got -1.0"),
        (lambda: TrainConfig(steps=2.5), "`train.steps` must be int; got 2.5"),
        (lambda: TrainConfig(ema=1.0), "`train.ema` must be at least 0 and below 1; got 1.0"),
        (lambda: TrainConfig(generative=0.0), "`train.generative` or `train.discriminative` must be above 0"),
        (lambda: FlowConfig(filters="3"), "`flow.filters` must be int; got '3'"),
        (lambda: ModelConfig((1, 8.0, 8)), "`shape` must be int; got 8.0"),
        (lambda: ModelConfig((1,), flow=ProcessConfig()), "`flow` must be a section of settings; got Proc"),
        (lambda: DataConfig("x", columns=("a", "a")), "`data.columns` must all differ; got 'a' twice"),
        (lambda: DataConfig("x", classes=("b", "b")), "`data.classes` must all differ; got 'b' twice"),
        (lambda: DataConfig(3), "`data.name` must be a string; got 3"),
        (
            lambda: Recipe(DataConfig("x"), pixels="no"),
            "`pixels` must be 'logit' or 'gaussianise' or 'mixture'; got 'no'",
        ),
        (lambda: attrs.evolve(TrainConfig(), way=1), "`train.way` must be at least 2; got 1"),
        (lambda: FlowConfig(couplings=10**8), r"`flow.couplings` must be at most 1000; got 100000000"),
        (lambda: TrainConfig(batch=10**12), r"`train.batch` must be at most 1048576; got 1000000000000"),
        (lambda: TrainConfig(shift=10**6), r"`train.shift` must be at most 10000; got 1000000"),
        (lambda: ModelConfig((10**6,) * 3), r"`shape` needs .* for \(1000000, .*BRUNO_MAX_MEMORY"),
        (lambda: ModelConfig((1,), levels=10**9), r"`levels` .*at most 65536.*got 1000000000"),
    ],
)
def test_configs_made_in_python_are_also_checked(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_lists_and_dictionaries_are_also_converted_in_python():
    assert ModelConfig([1, 8, 8], flow={"kind": "dense"}) == ModelConfig((1, 8, 8), flow=FlowConfig("dense"))


def test_a_config_does_not_change():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        FlowConfig().filters = 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("True", True),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e-3", 1e-3),
        ("['a', 'b']", ["a", "b"]),
        ("dense", "dense"),
        ("'None'", "None"),
        ("None", "None"),
        ("a,b", "a,b"),
        ("(1)", 1),
        ("inf", math.inf),
        ("{}", {}),
    ],
)
def test_values_are_those_of_toml_or_python(text, value):
    assert parse_settings([f"train.x={text}"]) == {"train": {"x": value}}


def test_every_setting_is_described():
    recipe = load_recipe("digits")
    assert describe(Recipe).keys() == flat(to_dict(recipe)).keys()
    assert all(describe(Recipe).values())
    assert describe(Recipe)["flow.kind"].endswith('"conv" or "dense"')


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_recipe_with_a_title(name):
    assert isinstance(load_recipe(name), Recipe)
    assert presets()[name]


def test_a_recipe_is_loaded_by_any_kind_of_path(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('data.name = "digits"\ntrain.steps = 7\n')
    for name in (path, str(path)):
        assert load_recipe(name, ["train.seed=3"]).train == TrainConfig(steps=7, seed=3)
    with pytest.raises(ValueError, match=r"`preset` .*got 'nowhere'"):
        load_recipe(Path("nowhere"))


def test_settings_of_version_0_1_keep_their_meaning():
    old = {"length": 7, "rate": 0.5, "process_rate": 2.0, "final_rate": 0.1}
    train = from_dict(Recipe, {"data": {"name": "x"}, "train": old}).train
    assert (train.set_size, train.learning_rate) == (7, 0.5)
    assert (train.process_learning_rate, train.final_learning_rate) == (2.0, 0.1)
    overridden = load_recipe("digits", ["train.rate=0.25"])  # as in commands of version 0.1
    assert overridden.train.learning_rate == 0.25


@pytest.mark.usefixtures("without_shape_checks")
def test_a_limit_on_a_non_number_names_the_argument():
    with pytest.raises(TypeError, match="`samples` must be a number of at least 1; got 'many'"):
        check_at_least("samples", "many", 1)


NUMBERS = [
    (section, field.name)
    for section in (FlowConfig, TrainConfig, DataConfig)
    for field in attrs.fields(section)
    if field.type in (int, float)
]


@pytest.mark.parametrize(("section", "name"), NUMBERS)
def test_every_number_has_an_upper_limit(section, name):
    given = {"name": "x"} if section is DataConfig else {}
    kind = attrs.fields_dict(section)[name].type
    with pytest.raises(ValueError, match=rf"{name}` must be .*; got "):
        section(**given, **{name: kind(2**64)})
