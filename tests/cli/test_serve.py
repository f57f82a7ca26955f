"""`bruno serve`: its options, without a service."""

import pytest

from cli.commandline import run, run_main


def served(monkeypatch, *arguments: str) -> tuple[str, dict]:
    """What the command prints, and the arguments that the library gets."""
    given = {}

    def serve(models, *, ready, **settings):
        given.update(settings)
        ready("http://somewhere/")

    monkeypatch.setattr("bruno.serving.serve", serve)
    return run("serve", "digits", *arguments), given


def test_the_number_of_elements_limits_samples_too(monkeypatch):
    _, given = served(monkeypatch, "--max-elements", "5")
    assert (given["limits"].elements, given["limits"].samples) == (5, 5)


def test_a_service_on_all_addresses_needs_the_names_of_the_machine(monkeypatch):
    for host, names, noted in (
        ("0.0.0.0", [], True),
        ("::", [], True),
        ("0.0.0.0", ["--allow-host", "machine.example"], False),
        ("192.0.2.1", [], False),
        ("localhost", [], False),
    ):
        output, _ = served(monkeypatch, "--host", host, *names)
        assert ("--allow-host" in output) == noted, (host, names)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-elements 0", "`--max-elements` must be a whole number"),
        ("--timeout 0", "`--timeout` must be above 0"),
        ("--token-file nowhere", "`--token-file` must be in a file; nowhere does not exist"),
    ],
)
def test_messages_name_the_options(capsys, line, message):
    ended = run_main(capsys, "serve", "omniglot-small", *line.split())
    assert ended.code == 2
    assert message in ended.errors
