"""The state of watched streams, one for each set, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bruno.checkpoint import read, write
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.tasks.drift import DriftTest, WithinSet
from bruno.tasks.keep_out import StreamEvidence

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
        if header["kind"] != "posterior" or header["model"] != model.fingerprint():
            raise ValueError(
                f"{path}: must be a state of this model, {model.fingerprint()}; got a {header['kind']} of "
                f"{header.get('model', 'no model')}."
            )
        about = header.get("watch")
        if about is None:
            evidence = Evidence(*(tensors[name] for name in ("count", "mean", "scatter")))
            return cls({"": SetState.of(StreamEvidence.of(evidence))})
        groups, single = about["groups"], about["groups"] == [""]
        sets = {group: _set_state(tensors, about, i, single) for i, group in enumerate(groups)}
        kept_out = tuple(
            KeptOut(name, group, tensors[f"kept_out.{i}"])
            for i, (name, group) in enumerate(about["kept_out"])
        )
        return cls(sets, kept_out)


def _set_state(tensors: dict[str, Tensor], about: dict[str, Any], i: int, single: bool) -> SetState:
    def part(prefix: str) -> Evidence:
        whole = Evidence(*(tensors[f"{prefix}{name}"] for name in ("count", "mean", "scatter")))
        return whole if single else whole[i]

    drift = about["drift"][i]
    return SetState(
        StreamEvidence(
            part(""), about["positions"][i], tensors[f"first.{i}"], tensors[f"usable.{i}"].to(torch.bool)
        ),
        WithinSet(part("all."), tensors[f"sample.{i}"]),
        DriftTest(**{**drift, "wealth": tuple(drift["wealth"])}),
    )
