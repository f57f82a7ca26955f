"""Malformed requests: each is refused with a reason on one line, and changes nothing."""

import struct
import zlib

import numpy as np
import pytest
from serving.service import SIZE, images, in_base64, new_key, png, put, rows, served

from bruno.serving import Limits

X = rows(2)
LIMITS = Limits(elements=8, samples=8, pixels=10_000)


@pytest.fixture(scope="module")
def client():
    with served(limits=LIMITS) as client:
        put(client, "a", X)
        yield client


def chunk(kind: bytes, content: bytes) -> bytes:
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def huge_png() -> bytes:
    """A PNG of a few bytes that declares 60,000 × 60,000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


BAD_ROWS = [
    [],
    [[]],
    [[1.0, 2.0, 3.0]],
    [[1.0, 2.0, 3.0, 4.0, 5.0]],
    [[1.0, 2.0, 3.0, "4"]],
    [[1.0, 2.0, 3.0, True]],
    [[1.0, 2.0, 3.0, [4.0]]],
    [[1.0, 2.0, 3.0, 1e308]],
    [[1.0, 2.0, 3.0, 10**400]],
    [[1.0, 2.0, 3.0, {}]],
    [1.0, 2.0, 3.0, 4.0],
    ["aGVsbG8="],
    [X[0], X[1][:3]],
    [None],
    X * 5,
]


@pytest.mark.parametrize("elements", BAD_ROWS, ids=lambda rows: str(rows)[:40])
def test_rows_that_do_not_fit_are_refused(client, elements):
    for method, path, more in (
        ("POST", "/score", {}),
        ("POST", "/rank", {"set": "a"}),
        ("POST", "/classify", {"support": {"a": "a", "b": X}}),
        ("PUT", "/sets/a/elements", {}),
    ):
        answer = client.request(method, path, json={"elements": elements, **more}, headers=new_key())
        assert answer.status_code in (413, 422), answer.text
        assert "\n" not in answer.json()["error"]
    assert client.get("/sets/a").json()["count"] == len(X)


BAD_IMAGES = [
    "",
    "no base64!",
    "aGVsbG8=",
    "data:image/jpeg;base64,aGVsbG8=",
    in_base64(images(1)[0])[:60],
    in_base64(np.zeros((200, 200), np.uint8)),
    [[0] * SIZE] * (SIZE - 1),
    [[256] * SIZE] * SIZE,
    [[-1] * SIZE] * SIZE,
    [[0.5] * SIZE] * SIZE,
    [[None] * SIZE] * SIZE,
    [[[[0]]]],
    7,
    None,
    {"png": "x"},
]


@pytest.mark.parametrize("element", BAD_IMAGES, ids=lambda one: str(one)[:40])
def test_images_that_do_not_fit_are_refused(client, element):
    answer = client.post("/score?model=images", json={"elements": [element]})
    assert answer.status_code in (413, 422), answer.text


def test_an_error_names_the_element_of_the_request(client):
    answer = client.post("/score?model=images", json={"elements": [BAD_IMAGES[0], [[256] * SIZE] * SIZE]})
    assert "`elements[0]`" in answer.json()["error"]
    for pixels in ([[256] * SIZE] * SIZE, [[0] * SIZE]):
        answer = client.post("/score?model=images", json={"elements": [pixels]})
        assert "`elements[0]` must" in answer.json()["error"]


def gif() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(images(1)[0]).save(file, "GIF")
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 422), (b"text", 422), (gif(), 422), (png(images(1)[0])[:50], 422), (huge_png(), 413)],
    ids=["empty", "text", "another format", "truncated", "a bomb"],
)
def test_bodies_that_are_not_png_or_too_large_are_refused_before_they_are_decoded(client, body, status):
    answer = client.post("/score?model=images", content=body, headers={"Content-Type": "image/png"})
    assert answer.status_code == status


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 10_000,
    b'{"elements": 3}',
    b'{"elements": [[1, 2, 3, 4]], "more": 1}',
    b'{"elements": [[1, 2, 3, 4]], "set": "a", "given": [[1, 2, 3, 4]]}',
    b'{"elements": [[1, 2, 3, 4]], "set": 1}',
    b'{"elements": [[1, 2, 3, NaN]], "set": "nothing"}',
    b'{"elements": [[1, 2, 3, Infinity]]}',
    b'{"elements": [[1, 2, 3, NaN]]}',
    b'{"elements": [[1, null, 3, NaN]]}',
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body)[:40])
def test_bodies_that_are_not_requests_are_refused(client, body):
    answer = client.post("/score", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (404, 422)
    assert len(answer.json()["error"]) < 500


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/sample", {"samples": 0}, 422),
        ("/sample", {"samples": 9}, 413),
        ("/sample", {"samples": 1.5}, 422),
        ("/sample", {"temperature": -1}, 422),
        ("/sample", {"seed": -1}, 422),
        ("/sample", {"seed": 2**63}, 422),
        ("/sample", {"set": "nothing"}, 404),
        ("/sample?model=nothing", {}, 404),
        ("/score?set=a", {"elements": X}, 422),
        ("/rank", {"elements": X, "top": 0}, 422),
        ("/classify", {"elements": X, "support": {"a": "a"}}, 422),
        ("/classify", {"elements": X, "support": {"a": "a", "b": "nothing"}}, 404),
        ("/classify", {"elements": X, "support": {"a": "a", "b": []}}, 422),
        ("/classify", {"elements": X, "support": {str(i): "a" for i in range(8)}}, 413),
        ("/classify", {"elements": X, "support": {"a": "a", "b": X}, "prior": {"a": 1}}, 422),
        ("/classify", {"elements": X, "support": {"a": "a", "b": X}, "prior": {"a": 1, "b": 0}}, 422),
        ("/classify", {"elements": X, "support": {"a": "a", "b": X}, "temperature": 0}, 422),
        ("/classify", {"elements": X, "support": {"a": "a", "b": X}, "none_rate": 1}, 422),
        ("/sets", {}, 405),
        ("/score/", {}, 404),
        ("/nothing", {}, 404),
    ],
    ids=str,
)
def test_other_malformed_requests_are_refused(client, path, body, status):
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "１"])
def test_a_list_has_a_limit(client, limit):
    assert client.get("/sets", params={"limit": limit}).status_code == 422


@pytest.mark.parametrize("id", ["x" * 201, "%00", "%0a", "%1b[2J"])
def test_ids_are_printable_and_short(client, id):
    assert client.get(f"/sets/{id}").status_code == 422
    assert client.put(f"/sets/{id}/elements", json={"elements": X}, headers=new_key()).status_code == 422


def test_the_documentation_has_every_operation_and_loads_nothing(client):
    documented = client.get("/openapi.json").json()["paths"]
    assert {(path, method) for path, operations in documented.items() for method in operations} == {
        ("/score", "post"),
        ("/sample", "post"),
        ("/classify", "post"),
        ("/rank", "post"),
        ("/sets", "get"),
        ("/sets/{id}", "get"),
        ("/sets/{id}", "delete"),
        ("/sets/{id}/elements", "put"),
        ("/sets/{id}/elements", "delete"),
        ("/models", "get"),
        ("/health", "get"),
        ("/metrics", "get"),
    }
    page = client.get("/docs").text
    assert all(path in page for path in documented)
    assert "<script" not in page
    assert "src=" not in page
    assert "//" not in page
    body = documented["/score"]["post"]["requestBody"]["content"]
    assert body.keys() == {"application/json", "image/png"}
    assert "elements" in body["application/json"]["schema"]["properties"]
