"""Files of watched streams: whatever they hold, they are read as states or rejected."""

import math
from functools import cache

import pytest
import torch

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.checkpoint import read, write
from bruno.tasks.drift import WithinSet
from bruno.tasks.stream_evidence import StreamEvidence
from bruno.trained import Trained
from bruno.trained.states import Excluded, SetState, WatchState


@cache
def model() -> Bruno:
    torch.manual_seed(0)
    made = Bruno.from_config(ModelConfig((3,), levels=0, flow=FlowConfig("dense", couplings=1, units=2)))
    return made.requires_grad_(False)


def states() -> WatchState:
    z = torch.arange(3.0)
    state = SetState(StreamEvidence.empty(3).including(z), WithinSet.empty(3).add(z))
    return WatchState({"a": state, "b": state}, (Excluded("line 3", "a", z, 0),))


def test_states_survive_a_file(tmp_path):
    states().save(tmp_path / "state", model())
    loaded = WatchState.load(tmp_path / "state", model())
    assert list(loaded.sets) == ["a", "b"]
    assert loaded.accepting(["line 3"]).sets["a"].stream.evidence.count == 2


def test_a_single_name_is_accepted_in_a_file(tmp_path):
    states().save(tmp_path / "state", model())
    trained = Trained(model(), None, tmp_path)
    assert trained.accept("line 3", tmp_path / "state").excluded == ()


def test_elements_of_one_name_in_several_sets_are_named_by_their_sets():
    several = WatchState(states().sets, (*states().excluded, Excluded("line 3", "b", torch.ones(3), 0)))
    with pytest.raises(ValueError, match=r"`names` .*'a, line 3', 'b, line 3'"):
        several.accepting(["line 3"])
    after = several.accepting(["b, line 3"])
    assert [one.stream.evidence.count for one in after.sets.values()] == [1, 2]
    assert after.accepting(["line 3"]).excluded == ()


@pytest.mark.parametrize(
    ("part", "value", "name"),
    [
        ("set.0", torch.zeros(4, dtype=torch.uint8), "'a'"),
        ("set.1", torch.zeros(0, dtype=torch.uint8), "'b'"),
        ("set.1", None, "set.1"),
        ("excluded.0", torch.full((3,), math.inf), "`excluded`"),
        ("groups", ["a", "a"], "`groups`"),
        ("groups", [], "`groups`"),
        ("excluded", [["line 3", "c", 0]], "`excluded`"),
        ("excluded", [["line 3", "a", "0"]], "`excluded`"),
    ],
)
def test_a_damaged_state_is_a_value_error_that_names_the_part(tmp_path, part, value, name):
    path = tmp_path / "state"
    states().save(path, model())
    tensors, header = read(path, "cpu")
    (header["watch"] if part in header["watch"] else tensors)[part] = value
    write(path, {key: tensor for key, tensor in tensors.items() if tensor is not None}, header)
    with pytest.raises(ValueError, match=rf"state: .*{name}"):
        WatchState.load(path, model())
