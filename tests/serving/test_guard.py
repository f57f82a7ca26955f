"""The promises of safety: each is a request that must be refused."""

import sys

import pytest
from serving.service import new_key, put, rows, served

from bruno.serving import Limits, create_app, serve
from bruno.serving import service as service_module

X = rows(2)
TOKEN = "a token of the tests".replace(" ", "-")
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client():
    with served(hosts=["machine.example"]) as client:
        yield client


# --- who and from where ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "machine.example", "machine.example:8000"],
)
def test_the_host_header_may_name_this_machine(client, host):
    assert client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "machine.example.",
        "",
        "localhost:8000:evil",
        "[::2]",
        "127.1",
    ],
)
def test_any_other_host_header_is_refused(client, host):
    """A page of evil.example could let its name point to 127.0.0.1."""
    for path in ("/", "/health", "/metrics", "/docs", "/sets"):
        assert client.get(path, headers={"Host": host}).status_code == 421


def test_a_repeated_header_is_refused(client):
    for name in ("Host", "Authorization", "Content-Type", "Origin"):
        headers = [("Host", "localhost")] * (name != "Host") + [(name, "localhost"), (name, "evil.example")]
        assert client.get("/health", headers=headers).status_code in (400, 421)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:3000", "http://localhost:8000"]
)
def test_web_pages_of_other_origins_are_refused_and_cors_is_off(client, origin):
    """The service is at 127.0.0.1:8000; another port is another origin."""
    for method, path in (("GET", "/sets"), ("POST", "/score"), ("OPTIONS", "/score")):
        answer = client.request(method, path, headers={"Origin": origin, **JSON})
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_own_origin_is_not_refused_but_has_no_cors_either(client):
    answer = client.post("/score", json={"elements": X}, headers={"Origin": "http://127.0.0.1:8000"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_forms_of_other_sites_are_refused_and_links_are_not(client, site):
    headers = {"Sec-Fetch-Site": site}
    assert client.post("/score", json={"elements": X}, headers=headers).status_code == 403
    assert client.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_content_that_a_form_can_send_is_refused(client, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    assert client.post("/score", content=b"{}", headers=headers).status_code == 415
    assert client.put("/sets/a/elements", content=b"{}", headers={**headers, **new_key()}).status_code == 415


def test_answers_are_neither_framed_nor_sniffed(client):
    for path in ("/health", "/docs", "/nothing"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    "given", [None, "", TOKEN, f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", "Bearer \xff"]
)
def test_without_the_token_everything_but_health_and_the_page_is_refused(given):
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    with served(token=TOKEN) as client:
        for path in ("/sets", "/models", "/metrics", "/docs", "/openapi.json", "/nothing"):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.post("/score", json={"elements": X}, headers=headers).status_code == 401
        assert client.get("/health", headers=headers).status_code == 200
        assert client.get("/", headers=headers, follow_redirects=False).status_code in (200, 307)


def test_with_the_token_everything_is_answered():
    with served(token=TOKEN) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        assert client.get("/models").status_code == 200
        assert put(client, "a", X).status_code == 200


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "with a space, but long enough", "ü" * 20])
def test_a_weak_token_is_refused(token):
    with pytest.raises(ValueError, match="`token`"):
        create_app({}, token=token)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "machine.example", ""])
def test_addresses_that_other_machines_can_reach_need_a_token(host):
    with pytest.raises(ValueError, match="`host`"):
        serve({}, host=host)


# --- how much --------------------------------------------------------------------------------------------


def chunks(count, size=1000):
    for _ in range(count):
        yield b" " * size


@pytest.mark.parametrize("content", [b" " * 5001, lambda: chunks(6)], ids=["declared", "in chunks"])
def test_a_body_that_is_too_large_is_refused(content):
    with served(limits=Limits(body=5000)) as client:
        body = content if isinstance(content, bytes) else content()
        answer = client.post("/score", content=body, headers=JSON)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 400, "１"])
def test_a_length_that_is_not_a_number_or_too_large_is_refused(client, length):
    headers = {**JSON, "Content-Length": length.encode()}
    assert client.post("/score", content=b"{}", headers=headers).status_code in (400, 413)


def test_the_bytes_of_all_requests_are_limited():
    with served(limits=Limits(body=5000, memory=5000)) as client:
        guard = client.app.middleware_stack
        while not hasattr(guard, "take"):
            guard = guard.app
        guard.take(4990)
        answer = client.post("/score", content=b" " * 100, headers=JSON)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        guard.give_back(4990)
        assert client.post("/score", json={"elements": X}).status_code == 200


def test_every_request_gives_its_memory_back(client):
    guard = client.app.middleware_stack
    while not hasattr(guard, "take"):
        guard = guard.app
    for content, headers in ((b"{}", JSON), (b"{", JSON), (b"", {}), (b" " * 5_000_000, JSON)):
        client.post("/score", content=content, headers=headers)
        client.post("/nothing", content=content, headers=headers)
    assert (guard._active, guard._bytes) == (0, 0)


# --- files -----------------------------------------------------------------------------------------------

PATHS = [
    "/sets/..%2f..%2f..%2fetc%2fpasswd",
    "/sets/%2fetc%2fpasswd",
    "/../../../../etc/passwd",
    "/..%2f..%2fetc%2fpasswd",
    "//etc/passwd",
    "/built/../../../etc/passwd",
    "/sets/secret-name",
    "/secret-name",
    "/sets/file:secret-name?mode=ro",
    "/secret-name.html",
]


def test_no_part_of_a_request_is_opened_as_a_file(tmp_path, monkeypatch):
    opened = []
    sys.addaudithook(
        lambda event, given: opened.append(str(given[0])) if event == "open" and watching else None
    )
    watching = False
    with served(tmp_path) as client:
        put(client, "a", X)
        client.get("/docs")
        watching = True
        for path in PATHS:
            assert client.get(path, follow_redirects=False).status_code in (404, 422)
            client.put(f"{path}/elements", json={"elements": X}, headers=new_key())
            client.delete(path, headers={"Idempotency-Key": "/tmp/secret-name"})
        for id in ("secret-name", "../secret-name", "/etc/passwd"):
            client.post("/score", json={"elements": X, "set": id})
            client.post(f"/score?model={id}", json={"elements": X})
            client.post("/score?model=images", json={"elements": [id]})
            client.post("/classify", json={"elements": X, "support": {id: id, "b": "a"}})
        watching = False
    assert not [name for name in opened if "secret" in name or "passwd" in name]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.db"}


# --- the service -----------------------------------------------------------------------------------------


def test_metrics_count_requests_by_route_and_never_by_what_they_contain(client):
    put(client, "secret-set", X)
    client.get("/secret-path")
    client.request("SECRET", "/score")
    text = client.get("/metrics").text
    assert 'bruno_requests_total{method="PUT",route="/sets/{id}/elements",status="200"}' in text
    assert 'method="other"' in text
    assert 'bruno_batch_elements_count{model="rows"}' in text
    assert "secret" not in text.lower()


def test_an_internal_error_reveals_no_details(client, monkeypatch):
    def failing(*given):
        raise RuntimeError("an internal secret")

    monkeypatch.setattr(service_module, "read_rows", failing)
    answer = client.post("/score", json={"elements": X})
    assert answer.status_code == 500
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "change", [{"body": 0}, {"seconds": 0.0}, {"waiting": 1.5}, {"body": 2**40}, {"batch": True}]
)
def test_limits_are_checked(change, without_shape_checks):
    with pytest.raises(ValueError, match=f"`{next(iter(change))}`"):
        Limits(**change)


@pytest.mark.parametrize(
    "models", [[], ["nowhere"], ["omniglot", "omniglot"], {"a/b": "omniglot"}, {"": "omniglot"}], ids=str
)
def test_invalid_models_are_refused(models, tmp_path):
    with pytest.raises(ValueError, match=r"`(models|path)`"):
        create_app(models, store=tmp_path / "sets")
    assert list(tmp_path.iterdir()) == []
