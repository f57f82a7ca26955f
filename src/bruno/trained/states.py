"""The state of watched streams, one for each set, and its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bruno.checkpoint import check_tensor, check_whole, parsing, read, require, write
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.tasks.drift import RANKS, DriftTest, WithinSet
from bruno.tasks.keep_out import START, StreamEvidence

_MOST_KEPT_OUT = 100  # elements that can still be accepted


class KeptOut(NamedTuple):
    """An element that did not count: its name, its set and its latents."""

    name: str
    group: str
    z: Tensor


@dataclass(frozen=True, eq=False)
class SetState:
    """The state of one stream: the evidence, all elements for ranks within the set, and a test of drift."""

    stream: StreamEvidence
    within: WithinSet
    drift: DriftTest = field(default_factory=DriftTest)

    @classmethod
    def of(cls, stream: StreamEvidence) -> SetState:
        """A state with this evidence, and no ranks yet."""
        return cls(stream, WithinSet.empty(stream.evidence.dim, stream.evidence.mean.device))


@dataclass(frozen=True, eq=False)
class WatchState:
    """The states of all sets of a watch by the name of the set, and the latest elements that did not count.

    A stream without groups is the set "".
    """

    sets: Mapping[str, SetState] = field(default_factory=dict)
    kept_out: tuple[KeptOut, ...] = ()

    def with_set(self, group: str, state: SetState) -> WatchState:
        """The states with that of one set replaced."""
        return WatchState({**self.sets, group: state}, self.kept_out)

    def with_kept_out(self, element: KeptOut) -> WatchState:
        """The states with another element that did not count."""
        return WatchState(self.sets, (*self.kept_out, element)[-_MOST_KEPT_OUT:])

    def accepting(self, names: list[str]) -> WatchState:
        """The states after elements that did not count have been added to their sets: alarms that were none.

        Raises:
            ValueError: if a name is not among the elements that did not count.
        """
        state = self
        for name in names:
            found = next((one for one in state.kept_out if one.name == name), None)
            if found is None:
                known = ", ".join(repr(one.name) for one in state.kept_out[-5:]) or "none"
                raise ValueError(
                    f"`names` must be of elements that did not count, the latest: {known}; got {name!r}."
                )
            own = state.sets[found.group]
            own = SetState(own.stream.including(found.z), own.within, own.drift)
            rest = tuple(one for one in state.kept_out if one is not found)
            state = WatchState({**state.sets, found.group: own}, rest)
        return state

    # --- files -------------------------------------------------------------------------------------------

    def save(self, path: Path, model: Bruno) -> None:
        """Write to a file, atomically; `bruno.load` reads its posteriors, one for each set."""
        states = list(self.sets.values())
        single = list(self.sets) == [""]
        stack = (lambda some: some[0]) if single else Evidence.stack
        evidence = stack([one.stream.evidence for one in states])
        within = stack([one.within.evidence for one in states])
        tensors = {name: getattr(evidence, name) for name in ("count", "mean", "scatter")}
        tensors |= {f"all.{name}": getattr(within, name) for name in ("count", "mean", "scatter")}
        for i, one in enumerate(states):
            tensors |= {f"first.{i}": one.stream.first, f"usable.{i}": one.stream.usable}
            tensors[f"sample.{i}"] = one.within.sample
        for i, element in enumerate(self.kept_out):
            tensors[f"kept_out.{i}"] = element.z
        header = {
            "kind": "posterior",
            "model": model.fingerprint(),
            "watch": {
                "groups": list(self.sets),
                "positions": [one.stream.position for one in states],
                "drift": [asdict(one.drift) for one in states],
                "kept_out": [(one.name, one.group) for one in self.kept_out],
            },
        }
        write(path, tensors, header)

    @classmethod
    def load(cls, path: Path, model: Bruno) -> WatchState:
        """Read a file that `save` wrote for the same model, or one with a single posterior."""
        tensors, header = read(path, model.device)
        if header["kind"] != "posterior" or header.get("model") != model.fingerprint():
            raise ValueError(
                f"{path}: must be a state of this model, {model.fingerprint()}; got a {header['kind']} of "
                f"{header.get('model', 'no model')}."
            )
        with parsing(path, "a state that `bruno anomaly watch --state` saved"):
            return cls._parse(tensors, header.get("watch"), model.dim)

    @classmethod
    def _parse(cls, tensors: dict[str, Tensor], about: Any, dim: int) -> WatchState:
        evidence = _evidence(tensors, "", dim)
        if about is None:
            require(not evidence.batch_shape, "count", "of one set")
            return cls({"": SetState.of(StreamEvidence.of(evidence))})
        groups = about["groups"]
        require(_are_names(groups) and len(set(groups)) == len(groups) > 0, "groups", "different names")
        require(len(about["kept_out"]) <= _MOST_KEPT_OUT, "kept_out", f"at most {_MOST_KEPT_OUT}")
        within, shape = _evidence(tensors, "all.", dim), () if groups == [""] else (len(groups),)
        for name, part in (("count", evidence), ("all.count", within)):
            require(tuple(part.batch_shape) == shape, name, f"of shape {shape}")
        kept_out = []
        for i, (name, group) in enumerate(about["kept_out"]):
            require(_are_names([name, group]) and group in groups, "kept_out", "names of elements and sets")
            kept_out.append(KeptOut(name, group, check_tensor("kept_out", tensors[f"kept_out.{i}"], (dim,))))
        sets = {}
        for i, group in enumerate(groups):
            own = (evidence[i], within[i]) if shape else (evidence, within)
            sets[group] = _set_state(tensors, about, i, *own)
        return cls(sets, tuple(kept_out))


def _set_state(
    tensors: dict[str, Tensor], about: dict[str, Any], i: int, evidence: Evidence, within: Evidence
) -> SetState:
    dim = evidence.mean.shape[-1]
    first, sample = (check_tensor(name, tensors[f"{name}.{i}"], (None, dim)) for name in ("first", "sample"))
    usable, position = tensors[f"usable.{i}"], check_whole("positions", about["positions"][i])
    require(len(first) < START and len(first) in (0, position), "first", f"the {position} elements so far")
    require(
        usable.shape == first.shape[:1] and usable.dtype == torch.bool, "usable", "one for each of `first`"
    )
    require(len(sample) == min(RANKS, int(within.count)), "sample", f"{RANKS} elements, or all")
    return SetState(
        StreamEvidence(evidence, position, first, usable),
        WithinSet(within, sample),
        _drift(about["drift"][i]),
    )


def _drift(values: dict[str, Any]) -> DriftTest:
    wealth = values["wealth"]
    require(len(wealth) == len(DriftTest().wealth), "wealth", "one number for each bet")
    for number in (*wealth, values["gain"]):
        require(isinstance(number, float) and math.isfinite(number), "wealth", "finite, as `gain`")
    for name in ("position", "since", "detected"):
        check_whole(name, values[name])
    return DriftTest(**{**values, "wealth": tuple(wealth)})


def _evidence(tensors: dict[str, Tensor], prefix: str, dim: int) -> Evidence:
    return Evidence.checked(dim, *(tensors[f"{prefix}{name}"] for name in ("count", "mean", "scatter")))


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
