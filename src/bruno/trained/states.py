"""The states of watched streams, one for each set, and the file that keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bruno.checkpoint import checked_tensor, parsing, read, require, write
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.streams.codec import USABLE, Ranks, SetRecord, decode, encode
from bruno.tasks.drift import DriftTest, WithinSet
from bruno.tasks.stream_evidence import StreamEvidence
from bruno.text import arguments_renamed

_MAX_EXCLUDED = 100  # elements that are remembered, so that `accepting` can still add them
SET_SEPARATOR = ", "  # between the name of a set and that of an element
_CANDIDATES = 5  # elements that an error names


class Excluded(NamedTuple):
    """An element that was excluded from the evidence of its set: its name, its set and its latents.

    `number` is the number of elements of the set before it.
    """

    name: str
    group: str
    z: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class SetState:
    """The state of one set: its evidence, the sample for ranks within the set, and the test for drift.

    `names` are those of the elements that may be reconsidered, `stream.first`.
    """

    stream: StreamEvidence
    within: WithinSet
    drift: DriftTest = field(default_factory=DriftTest)
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, stream: StreamEvidence) -> SetState:
        """A state with the evidence of a stream, and no ranks yet."""
        return cls(stream, WithinSet.empty(stream.evidence.dim, stream.evidence.mean.device))


@dataclass(frozen=True, eq=False)
class WatchState:
    """The state of each watched set by its name, and the latest elements excluded from their sets.

    The set of a stream without groups has the name "".
    """

    sets: Mapping[str, SetState] = field(default_factory=dict)
    excluded: tuple[Excluded, ...] = ()

    def with_set(self, group: str, state: SetState) -> WatchState:
        """A copy with the state of one set replaced."""
        return WatchState({**self.sets, group: state}, self.excluded)

    def with_decided(self, group: str, latest: Sequence[tuple[str, Tensor]]) -> WatchState:
        """A copy that remembers those elements that do not count, of all that the last step decided about.

        `latest` are the names and latents of the latest elements of the set, at least of the decided ones.
        """
        stream = self.sets[group].stream
        counts = stream.decided.tolist()
        begin = stream.position - len(counts)
        kept = (one for one in self.excluded if one.group != group or one.number < begin)
        new = (
            Excluded(name, group, z, begin + i)
            for i, (name, z) in enumerate(latest[-len(counts) :])
            if not counts[i]
        )
        return WatchState(self.sets, (*kept, *new)[-_MAX_EXCLUDED:])

    def accepting(self, names: Sequence[str]) -> WatchState:
        """A copy in which elements that were excluded by mistake are added to their sets.

        The folders at the beginning of a name may be omitted if the rest names only one element. "SET, NAME"
        names an element of one set, if several sets have elements of this name.

        Raises:
            ValueError: if a name is not that of a remembered element, or that of elements of several sets.
        """
        state = self
        for name in names:
            found = state._element(name)
            own = state.sets[found.group]
            own = SetState(own.stream.including(found.z), own.within, own.drift)
            rest = tuple(one for one in state.excluded if one is not found)
            state = WatchState({**state.sets, found.group: own}, rest)
        return state

    def _element(self, name: str) -> Excluded:
        """The remembered element with a name, the latest of its set; raises unless there is one."""
        full = [one for one in self.excluded if f"{one.group}{SET_SEPARATOR}{one.name}" == name]
        known = [one.name for one in self.excluded]
        if not full and name not in known:
            ending = dict.fromkeys(one for one in known if one.endswith(f"/{name}"))
            name = only_name(name, list(ending), known)
        found = full or [one for one in self.excluded if one.name == name]
        check_one_set(name, list(dict.fromkeys(one.group for one in found)))
        return found[-1]

    # --- files -------------------------------------------------------------------------------------------

    def save(self, path: Path, model: Bruno) -> None:
        """Write to a file, atomically; `bruno.load` reads the posteriors in it, one for each set."""
        fingerprint, states = model.fingerprint(), list(self.sets.values())
        has_groups = list(self.sets) != [""]
        every = [one.stream.evidence for one in states]
        evidence = Evidence.stack(every) if has_groups else every[0]
        tensors = {name: getattr(evidence, name) for name in ("count", "mean", "scatter")}
        for i, (group, state) in enumerate(self.sets.items()):
            data = bytearray(encode(_record_of(state), fingerprint, group))
            tensors[f"set.{i}"] = torch.frombuffer(data, dtype=torch.uint8)
        for i, element in enumerate(self.excluded):
            tensors[f"excluded.{i}"] = element.z
        about = {
            "groups": list(self.sets),
            "excluded": [(one.name, one.group, one.number) for one in self.excluded],
        }
        write(path, tensors, {"kind": "posterior", "model": fingerprint, "watch": about})

    @classmethod
    def load(cls, path: Path, model: Bruno) -> WatchState:
        """Read a file that `save` wrote for the same model, or one with a single posterior."""
        if not path.is_file():
            raise FileNotFoundError(
                f"`state` must be a file that `bruno anomaly watch --state` or `Watch.save` wrote; {path} "
                "does not exist."
            )
        with arguments_renamed({"path": "state"}):
            tensors, header = read(path, "cpu")
        fingerprint = model.fingerprint()
        if header["kind"] != "posterior" or header.get("model") != fingerprint:
            raise ValueError(
                f"{path}: must be a state of this model, {fingerprint}; got a {header['kind']} of "
                f"{header.get('model', 'no model')}."
            )
        with parsing(path, "a state that `bruno anomaly watch --state` saved"):
            return cls._parse(tensors, header.get("watch"), fingerprint, model)

    @classmethod
    def _parse(cls, tensors: dict[str, Tensor], about: Any, fingerprint: str, model: Bruno) -> WatchState:
        if about is None:
            evidence = Evidence.checked(model.dim, *(tensors[name] for name in ("count", "mean", "scatter")))
            require(not evidence.batch_shape, "count", "of one set")
            return cls({"": SetState.of(StreamEvidence.of(evidence.to(model.device)))})
        groups = about["groups"]
        require(_are_names(groups) and len(set(groups)) == len(groups) > 0, "groups", "different names")
        require(len(about["excluded"]) <= _MAX_EXCLUDED, "excluded", f"at most {_MAX_EXCLUDED}")
        records = {}
        for i, group in enumerate(groups):
            records[group] = decode(tensors[f"set.{i}"].numpy().tobytes(), fingerprint, model.dim, group)
        excluded = []
        for i, (name, group, *number) in enumerate(about["excluded"]):
            require(_are_names([name, group]) and group in groups, "excluded", "names of elements and sets")
            z = checked_tensor("excluded", tensors[f"excluded.{i}"], (model.dim,)).to(model.device)
            # In older files without numbers, the next reconsideration decides about all of a set.
            (place,) = number or (records[group].position - 1,)
            require(isinstance(place, int), "excluded", "numbers of elements")
            excluded.append(Excluded(name, group, z, place))
        sets = {group: _state_of(record, group, excluded, model.device) for group, record in records.items()}
        return cls(sets, tuple(excluded))


def only_name(name: str, ending: Sequence[str], known: Sequence[str]) -> str:
    """The name of the only element whose name ends with a given one; raises ValueError unless there is one.

    Args:
        name: the given name.
        ending: the different names that end with it.
        known: names of excluded elements, from old to new, for the error.
    """
    if len(ending) == 1:
        return ending[0]
    if ending:
        candidates = ", ".join(map(repr, ending[:_CANDIDATES])) + ", …" * (len(ending) > _CANDIDATES)
        raise ValueError(f"`names` must each match one element; got {name!r}, which matches {candidates}.")
    latest = ", ".join(map(repr, known[-_CANDIDATES:])) or "none"
    raise ValueError(
        f"`names` must be names of excluded elements, the latest: {latest}; got {name!r}. Excluded elements "
        "among the first of a set may have been added since."
    )


def check_one_set(name: str, sets: Sequence[str]) -> None:
    """Raise ValueError if elements of several sets, at most as many as an error names, have a name."""
    if len(sets) > 1:
        candidates = ", ".join(repr(f"{one}{SET_SEPARATOR}{name}") for one in sets[:_CANDIDATES])
        raise ValueError(
            f"`names` must each match one element; got {name!r}, which is in several sets. Name the set: "
            f"{candidates}{', …' * (len(sets) > _CANDIDATES)}."
        )


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _record_of(state: SetState) -> SetRecord:
    """The state of a set, for the codec."""
    stream = state.stream
    record = SetRecord.of(stream.evidence)
    record.position = stream.position
    record.first, record.less = stream.first.cpu().numpy(), stream.less.double().cpu().numpy()
    record.flags = USABLE * stream.usable.cpu().numpy().astype(np.uint8)
    record.ranks, record.incomplete = Ranks(state.within, state.drift), stream.incomplete
    record.ids = list(state.names)
    return record


def _state_of(record: SetRecord, group: str, excluded: Sequence[Excluded], device: torch.device) -> SetState:
    """The state of a set that a record describes, on a device.

    Records of older files have no names; those of excluded elements are found by their latents.
    """
    known = {one.z.cpu().numpy().tobytes(): one.name for one in excluded if one.group == group}
    begin = record.position - len(record.first) + 1
    names = record.ids or [
        known.get(z.tobytes(), f"element {number}") for number, z in enumerate(record.first, begin)
    ]
    if record.ranks is None:
        raise ValueError("a set has no ranks")
    usable = torch.from_numpy((record.flags & USABLE) > 0).to(device)
    first, less = (torch.from_numpy(part).to(device) for part in (record.first, record.less))
    stream = StreamEvidence(
        record.evidence.to(device), record.position, first, usable, less, usable[:0], record.incomplete
    )
    within = WithinSet(record.ranks.within.evidence.to(device), record.ranks.within.sample.to(device))
    return SetState(stream, within, record.ranks.drift, tuple(names))
