"""Exactly the elements that do not count are remembered as excluded, however often they are reconsidered."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from streams.keyed import NAN, detector, keyed, machines, trained

from bruno.checkpoint import read, write
from bruno.data import Element
from bruno.process import Evidence
from bruno.streams.codec import decode, encode
from bruno.trained.keyed import KeyedDetector
from bruno.trained.states import WatchState

SETS = 4
STREAMS = range(3)


def foreign(seed: int, rows: int = 30) -> list[Element]:
    """Rows of several sets in random order; some are of other sets, and some are equal."""
    random = np.random.default_rng(seed)
    x = machines(SETS, rows, seed)
    planted = random.random((SETS, rows)) < 0.25
    x[planted] = machines(int(planted.sum()), 1, seed + 100)[:, 0]
    x[:, 4], x[:, 8] = x[:, 1], x[:, 7]
    x[0, :2] = machines(2, 1, seed + 200)[:, 0]
    order = random.permutation(np.repeat(np.arange(SETS), rows))
    count: dict[int, int] = defaultdict(int)
    found = []
    for one in order.tolist():
        row = torch.from_numpy(x[one, count[one]])
        count[one] += 1
        found.append(Element(f"row {count[one]} of {one}", row, f"m{one}"))
    return found


def assert_evidence_is_of(evidence: Evidence, elements: Iterable[Element]) -> None:
    x = torch.stack([one.x for one in elements])
    expected = Evidence.of(trained().model.latents(x).double())
    assert evidence.count == expected.count
    torch.testing.assert_close(evidence.mean, expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(evidence.scatter, expected.scatter, rtol=1e-4, atol=1e-4)


def assert_others_count(seen: Sequence[Element], remembered: Iterable[str], evidence: Evidence) -> None:
    """The evidence is that of the elements of a set that are not remembered; these are all different."""
    names = list(remembered)
    assert len(set(names)) == len(names)
    assert set(names) <= {one.name for one in seen}
    assert int(evidence.count) + len(names) == len(seen)
    assert_evidence_is_of(evidence, [one for one in seen if one.name not in names])


def by_set(elements: Sequence[Element]) -> dict[str, list[Element]]:
    return {set_: [one for one in elements if one.group == set_] for set_ in {one.group for one in elements}}


# --- watched streams -------------------------------------------------------------------------------------


def names_in(state: WatchState, group: str) -> list[str]:
    return [one.name for one in state.excluded if one.group == group]


@pytest.mark.slow
@pytest.mark.parametrize("seed", STREAMS)
def test_a_watch_remembers_exactly_the_elements_that_do_not_count(tmp_path, seed):
    elements, file, size = foreign(seed), tmp_path / "state", 7
    changes = 0
    for start in range(0, len(elements), size):  # each part is a run of its own
        with trained().watch(elements[start : start + size], detector(), state=file) as watch:
            for i, (element, _) in enumerate(watch, start + 1):
                group, before = element.group, names_in(watch.state, element.group)
                seen = [one for one in elements[:i] if one.group == group]
                evidence = watch.posteriors[group].evidence
                assert_others_count(seen, after := names_in(watch.state, group), evidence)
                changes += bool({*before} ^ {*after} - {element.name})
        with pytest.raises(ValueError, match=f"'{elements[0].name[:-1]}x'"):
            WatchState.load(file, trained().model).accepting([f"{elements[0].name[:-1]}x"])
    assert changes > 3
    watch.accept(*(one.name for one in watch.state.excluded))
    assert not watch.state.excluded
    for group, some in by_set(elements).items():
        assert_evidence_is_of(watch.posteriors[group].evidence, some)


@pytest.mark.slow
@pytest.mark.parametrize("seed", STREAMS)
@pytest.mark.parametrize("window", [5, 19])
def test_a_watch_with_a_window_remembers_the_elements_in_it_that_do_not_count(tmp_path, seed, window):
    elements = [one._replace(group="") for one in foreign(seed)[:60]]
    single, gone = dataclasses.replace(detector(), window=window), set[str]()
    for start in range(0, len(elements), 9):
        with trained().watch(elements[start : start + 9], single, state=tmp_path / "state") as watch:
            for i, _ in enumerate(watch, start + 1):
                inside, names = elements[max(0, i - window) : i], set(names_in(watch.state, ""))
                within = names & {one.name for one in inside}
                assert_others_count(inside, within, watch.posterior.evidence)
                assert names - within >= gone  # an excluded element that has left the window is remembered
                gone = names - within


def test_rows_that_never_count_are_remembered_once():
    elements = foreign(0)[:40]
    for i in (0, 1, 2, 9, 20):  # incomplete or out-of-distribution
        x = elements[i].x.clone()
        x[0] = NAN if i < 9 else 1e6
        elements[i] = elements[i]._replace(x=x)
    watch = trained().watch(elements, detector())
    list(watch)
    for group, some in by_set(elements).items():
        names = names_in(watch.state, group)
        assert len(set(names)) == len(names)
        assert int(watch.posteriors[group].evidence.count) + len(names) == len(some)


def test_a_watch_continues_from_a_file_without_the_names_of_first_elements(tmp_path):
    """Such files may remember the wrong elements, until the next reconsideration."""
    elements, file = [one._replace(group="") for one in foreign(1) if one.group == "m0"], tmp_path / "state"
    model = trained().model
    with trained().watch(elements[:7], detector(), state=file) as watch:
        list(watch)
    tensors, header = read(file, "cpu")
    about, fingerprint = header["watch"], model.fingerprint()
    about["excluded"] = [one[:2] for one in about["excluded"]]
    record = decode(tensors["set.0"].numpy().tobytes(), fingerprint, model.dim, "")
    record.ids = []
    tensors["set.0"] = torch.frombuffer(bytearray(encode(record, fingerprint, "")), dtype=torch.uint8)
    write(file, tensors, header)
    with trained().watch(elements[7:], detector(), state=file) as later:
        list(later)
    ours = [f"element {i}" for i in range(1, 8)]
    known = dict(zip(ours, (one.name for one in elements), strict=False))
    names = [known.get(name, name) for name in names_in(later.state, "")]
    assert_others_count(elements, names, later.posterior.evidence)
    remembered = {one.name for one in watch.state.excluded}
    assert remembered & set(names_in(later.state, ""))  # names that the file has are kept


# --- keyed streams ---------------------------------------------------------------------------------------


def assert_rest_counts(judge: KeyedDetector, elements: Sequence[Element]) -> None:
    names = judge.store.latest_excluded(10**6)
    assert len(names) == judge.store.count_excluded()
    assert set(names) <= {one.name for one in elements}
    for group, seen in by_set(elements).items():
        own = {one.name for one in seen}
        remembered = [name for name in names if name in own]
        assert_others_count(seen, remembered, judge.posterior(group).evidence)


def step(judge: KeyedDetector, rows: Sequence[Element], ids: bool) -> None:
    names = [one.name for one in rows] if ids else None
    judge.step([one.group for one in rows], torch.stack([one.x for one in rows]), ids=names)


@pytest.mark.slow
@pytest.mark.parametrize("seed", STREAMS)
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("window", [None, 200])
def test_a_store_remembers_exactly_the_elements_that_do_not_count(tmp_path, seed, ids, window):
    elements, random, start = foreign(seed), np.random.default_rng(seed), 0
    if not ids:  # the default names
        place = {one.name: int(one.name.split()[1]) for one in elements}
        elements = [one._replace(name=f"{one.group}/{place[one.name]}") for one in elements]
    settings = {"detector": detector(), "window": window, "cache": 2, "commit_rows": 10**6}
    while start < len(elements):  # each run of the process ends after some steps
        with keyed(tmp_path / "s.db", **settings) as judge:
            for _ in range(5):
                size = int(random.integers(1, 9))
                if rows := elements[start : start + size]:
                    step(judge, rows, ids)
                    if random.random() < 0.3:
                        assert judge.undo() == len(rows)
                    else:
                        start += len(rows)
                if random.random() < 0.3:
                    judge.commit()
                    assert_rest_counts(judge, elements[:start])
    with keyed(tmp_path / "s.db", **settings) as judge:
        assert_rest_counts(judge, elements)
        judge.accept(*judge.store.latest_excluded(10**6))
        assert not judge.store.count_excluded()
        for group, some in by_set(elements).items():
            assert_evidence_is_of(judge.posterior(group).evidence, some)


@pytest.mark.parametrize("seed", STREAMS)
def test_a_store_without_the_names_of_first_elements_is_continued(tmp_path, seed):
    elements, model = foreign(seed), trained().model
    with keyed(tmp_path / "s.db") as judge:
        step(judge, elements[:30], True)
    with keyed(tmp_path / "s.db") as judge:
        for name, data in judge.store.states(list(judge)).items():
            record = decode(data, model.fingerprint(), model.dim, name)
            record.ids = []
            judge.store.put([(name, encode(record, model.fingerprint(), name))])
        judge.store.commit()
    with keyed(tmp_path / "s.db") as judge:
        step(judge, elements[30:], True)
        judge.commit()
        numbers: dict[str, int] = defaultdict(int)
        for one in elements:
            numbers[one.group] += 1
        counts = [int(judge.posterior(group).evidence.count) for group in numbers]
        assert sum(counts) + judge.store.count_excluded() == len(elements)


# --- examples --------------------------------------------------------------------------------------------


def planted(place: int, seed: int) -> list[Element]:
    x = machines(2, 20, seed)
    x[0, place] = x[1, 0]
    return [Element(f"row {i}", one, "a") for i, one in enumerate(torch.from_numpy(x[0]), start=1)]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_foreign_row_at_the_beginning_can_be_accepted_and_no_clean_row_twice(place):
    accepted = 0
    for seed in range(10):
        rows = planted(place, seed)
        watch = trained().watch(rows, detector())
        list(watch)
        judge = keyed(detector=detector())
        step(judge, rows, True)
        judge.commit()
        name, names = f"row {place + 1}", names_in(watch.state, "a")
        assert sorted(names) == sorted(judge.store.latest_excluded(20))
        if name in names:
            for one in (watch, judge):
                one.accept(name)
                with pytest.raises(ValueError, match=name):
                    one.accept(name)
            assert watch.posterior.evidence.count == judge.posterior("a").evidence.count == 21 - len(names)
            accepted += 1
    assert accepted > 5
