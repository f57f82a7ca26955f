import pytest

from bruno.config import FlowConfig, ModelConfig, ProcessConfig, from_dict, to_dict


def test_dictionaries_and_configs_are_the_same():
    config = ModelConfig((1, 8, 8), flow=FlowConfig(filters=3), process=ProcessConfig("gaussian"))
    assert from_dict(ModelConfig, to_dict(config)) == config
    assert from_dict(ModelConfig, {"shape": [7], "levels": 0}).shape == (7,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": [1], "flow": {"filtres": 3}}, r"`flow.filtres` is not a setting .* `flow.filters`\?"),
        ({"shape": [1], "pixels": "probit"}, "`pixels` must be 'logit' or 'gaussianise'; got 'probit'"),
        ({"shape": [1], "xyz": 3}, "`xyz` is not a setting of ModelConfig; known are alpha"),
        ({"shape": [1], "flow": {"kind": "cnn"}}, "`flow.kind` must be 'conv' or 'dense'; got 'cnn'"),
        ({"shape": [1], "process": {"kind": "t"}}, "`process.kind` must be 'student-t' or 'gaussian'"),
        ({"shape": [1], "flow": {"filters": 0}}, "`flow.filters` must be at least 1; got 0"),
        ({}, "`shape` must be given: it has no default"),
        ({"shape": 4}, r"`shape` must be a list, as .* or \[1, 2\]; got 4"),
        ({"shape": [4], "flow": "dense"}, "`flow` must be a table; got 'dense'"),
        ({"shape": [4], "flow": {"scales": "2"}}, "`flow.scales` must be int; got '2'"),
        ({"shape": [4], "flow": {"scales": True}}, "`flow.scales` must be int; got True"),
        ({"shape": [4], "process": {"dof": "a"}}, "`process.dof` must be float or int; got 'a'"),
        ({"shape": []}, "`shape` must be positive sizes"),
        ({"shape": [4], "levels": 1}, "`levels` must be at least 2, or 0 for real numbers; got 1"),
    ],
)
def test_mistakes_name_the_setting_and_the_way_out(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(ModelConfig, values)
