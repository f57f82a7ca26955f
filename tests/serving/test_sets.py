"""Sets as resources: elements that are added, removed exactly, and counted once."""

import pytest
from serving.service import images, in_base64, new_key, put, rows, served
from streams.keyed import keyed

X = rows(6)


@pytest.fixture
def client():
    with served() as client:
        yield client


def remove(client, id, elements):
    return client.request("DELETE", f"/sets/{id}/elements", json={"elements": elements}, headers=new_key())


def scores(client, id):
    return client.post("/score", json={"elements": rows(3, seed=8), "set": id}).json()["scores"]


def test_removed_elements_leave_no_trace(client):
    put(client, "a", X[:2])
    put(client, "b", X)
    assert remove(client, "b", X[2:]).json() == {"model": "rows", "id": "b", "count": 2, "removed": 4}
    assert scores(client, "b") == pytest.approx(scores(client, "a"), abs=1e-6)


def test_images_are_removed_too(client):
    put(client, "a", [in_base64(one) for one in images(3)], "images")
    answer = client.request(
        "DELETE",
        "/sets/a/elements?model=images",
        json={"elements": [images(3)[1].tolist()]},
        headers=new_key(),
    )
    assert answer.json()["count"] == 2


def test_elements_that_were_not_added_are_not_removed(client):
    put(client, "a", X[:2])
    before = scores(client, "a")
    unknown = remove(client, "a", [[9.0] * 4])
    assert unknown.status_code == 409
    assert "`elements`" in unknown.text
    assert remove(client, "a", X).status_code == 409
    assert scores(client, "a") == before


def test_a_set_is_described_listed_and_deleted(client):
    assert client.get("/sets/a").status_code == 404
    for id in ("b", "a", "press 1", "für@x:1"):
        put(client, id, X[:2])
    assert client.get("/sets/press 1").json() == {"model": "rows", "id": "press 1", "count": 2}
    assert client.get("/sets").json() == {
        "model": "rows",
        "ids": ["a", "b", "für@x:1", "press 1"],
        "count": 4,
    }
    assert client.get("/sets?after=a&limit=1").json()["ids"] == ["b"]
    assert client.delete("/sets/a", headers=new_key()).status_code == 200
    assert client.get("/sets/a").status_code == 404
    assert client.delete("/sets/a", headers=new_key()).status_code == 404


@pytest.mark.parametrize("change", ["PUT", "DELETE"])
def test_a_repeated_change_counts_once_and_has_the_same_answer(client, change):
    put(client, "a", X[:3])
    path, key = "/sets/a/elements", new_key()
    answers = [client.request(change, path, json={"elements": X[:1]}, headers=key) for _ in range(3)]
    assert [one.json() for one in answers] == [answers[0].json()] * 3
    assert client.get("/sets/a").json()["count"] == {"PUT": 4, "DELETE": 2}[change]


def test_a_repeated_deletion_is_not_an_error(client):
    put(client, "a", X[:3])
    key = new_key()
    assert [client.delete("/sets/a", headers=key).status_code for _ in range(2)] == [200, 200]
    put(client, "a", X[:3])
    client.delete("/sets/a", headers=key)
    assert client.get("/sets/a").json()["count"] == 3


def test_a_key_is_for_one_request(client):
    key = new_key()
    client.put("/sets/a/elements", json={"elements": X[:1]}, headers=key)
    for path, body in (("/sets/a/elements", X[:2]), ("/sets/b/elements", X[:1])):
        answer = client.put(path, json={"elements": body}, headers=key)
        assert answer.status_code == 422
        assert "Idempotency-Key" in answer.json()["error"]
    assert client.get("/sets").json()["ids"] == ["a"]


@pytest.mark.parametrize("key", [None, "", "x" * 201])
def test_a_change_needs_a_key(client, key):
    headers = {} if key is None else {"Idempotency-Key": key}
    answers = [
        client.put("/sets/a/elements", json={"elements": X}, headers=headers),
        client.request("DELETE", "/sets/a/elements", json={"elements": X}, headers=headers),
        client.delete("/sets/a", headers=headers),
    ]
    assert [one.status_code for one in answers] == [400] * 3


def test_sets_and_keys_are_kept_when_the_service_starts_again(tmp_path):
    key = new_key()
    for _ in range(2):
        with served(tmp_path) as client:
            client.put("/sets/a/elements", json={"elements": X[:2]}, headers=key)
            assert client.get("/sets/a").json()["count"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.db"]  # nothing was kept of images


def test_if_a_commit_fails_nothing_is_acknowledged_and_nothing_has_happened(tmp_path, monkeypatch):
    from bruno.streams.store import Store

    with served(tmp_path) as client:
        put(client, "a", X[:2])
        with monkeypatch.context() as patch:
            patch.setattr(Store, "commit", lambda self: (_ for _ in ()).throw(OSError("the disk is full")))
            assert put(client, "a", X[2:]).status_code == 500
        assert client.get("/sets/a").json()["count"] == 2
        assert put(client, "a", X[2:]).json()["count"] == len(X)


def test_a_set_remembers_in_the_store_that_a_row_was_incomplete(tmp_path):
    """A stream that continues the set must not call its p-values exact."""
    with served(tmp_path) as client:
        for id, row in (("complete", X[2]), ("incomplete", [None, *X[2][1:]])):
            put(client, id, X[:2])
            put(client, id, [row])
            put(client, id, [X[3]])
        assert remove(client, "incomplete", [X[3]]).status_code == 200
    with keyed(tmp_path / "rows.db") as judge:
        assert judge.step(["complete", "incomplete"], X[4:]).exact.tolist() == [True, False]


def with_hole(row):
    return [None, *row[1:]]


def test_incomplete_rows_do_not_count_before_a_complete_row(client):
    """Their missing numbers would be guesses at the level of the set."""
    assert put(client, "a", [with_hole(row) for row in X]).status_code == 422
    answer = put(client, "a", [with_hole(X[0])])
    assert answer.status_code == 422
    assert "`elements`" in answer.json()["error"]
    assert client.get("/sets/a").status_code == 404
    assert put(client, "a", [with_hole(X[0]), X[1]]).json()["count"] == 2
    assert put(client, "a", [with_hole(X[2])]).json()["count"] == 3
    assert remove(client, "a", [X[1]]).json()["count"] == 2
    assert put(client, "a", [with_hole(X[3])]).json()["count"] == 3


def test_incomplete_rows_do_not_count_in_a_set_whose_elements_were_all_removed(client):
    put(client, "a", X[:1])
    assert remove(client, "a", X[:1]).json()["count"] == 0
    assert put(client, "a", [with_hole(X[0])]).status_code == 422


def test_missing_numbers_of_a_new_set_are_imputed_from_all_rows_of_the_request(client):
    some = [*X[:4], with_hole(X[4])]
    put(client, "a", some)
    given = client.post("/score", json={"elements": rows(3, seed=8), "given": some}).json()["scores"]
    assert scores(client, "a") == pytest.approx(given, abs=1e-6)


def test_missing_numbers_are_imputed_from_the_set_and_the_complete_rows_of_the_request(client):
    put(client, "together", X[:2])
    put(client, "together", [with_hole(X[2]), *X[3:]])
    put(client, "in turn", X[:2])
    put(client, "in turn", X[3:])
    put(client, "in turn", [with_hole(X[2])])
    assert scores(client, "together") == pytest.approx(scores(client, "in turn"), abs=1e-6)


def test_a_row_without_any_number_is_refused(client):
    answer = put(client, "a", [X[0], [None] * 4])
    assert answer.status_code == 422
    assert "row 2 has none" in answer.json()["error"]
    asked = {"elements": X[:1], "given": [X[0], [None] * 4]}
    assert "`given`" in client.post("/score", json=asked).json()["error"]


@pytest.mark.parametrize("count", [2, 300])
def test_an_element_is_one_image(client, count):
    several = [image.tolist() for image in images(count)]
    answer = put(client, "a", [several], "images")
    assert answer.status_code == 422
    assert f"`elements[0]` must be one image; got {count}" in answer.json()["error"]
    assert put(client, "a", [several[:1]], "images").json()["count"] == 1  # an axis of one channel


def test_incomplete_rows_cannot_be_removed(client):
    put(client, "a", [*X[:2], with_hole(X[2])])
    answer = remove(client, "a", [with_hole(X[2])])
    assert answer.status_code == 422
    assert "`elements` must have no missing numbers" in answer.json()["error"]
    assert client.get("/sets/a").json()["count"] == 3
