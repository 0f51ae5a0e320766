"""`relay serve FILE.yaml`: what a file may say, and what each mistake in it is answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relay.cli.main import main
from relay.cli.options import ListenerOptions, PolicyOptions
from relay.cli.serve_file import InvalidFile, read_serve_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "robots.yaml"


def test_each_policy_has_its_own_options_and_the_rest_is_the_listeners(file: Path):
    file.write_text(
        "port: 9000\nidle_timeout: 5\nmodels:\n"
        "  droid: {model: pi05, checkpoint: weights/droid, max_batch: 4, seed: 7}\n"
        "  demo:\n"
    )
    content = read_serve_file(file)
    assert content.listener == ListenerOptions(port=9000, idle_timeout=5.0)
    assert list(content.policies.items()) == [
        ("droid", ("pi05", PolicyOptions(checkpoint=file.parent / "weights/droid", max_batch=4, seed=7))),
        ("demo", ("demo", PolicyOptions())),
    ]


def test_the_default_policy_comes_first(file: Path):
    file.write_text("default: b\nmodels: {a: {model: demo}, b: {model: demo}}\n")
    assert list(read_serve_file(file).policies) == ["b", "a"]


def test_an_absolute_path_stays_as_it_is(file: Path):
    file.write_text("models: {pi0: {checkpoint: /data/pi0}}\n")
    assert read_serve_file(file).policies["pi0"][1].checkpoint == Path("/data/pi0")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("models: [demo]", "expected a map with the key 'models'"),
        ("port: 1", "expected a map with the key 'models'"),
        ("- 1", "expected a map with the key 'models'"),
        ("models: {demo: {max_bach: 2}}", "models.demo.max_bach is not an option, did you mean 'max_batch'?"),
        ("models: {demo: }\nprot: 1", "prot is not an option, did you mean 'port'?"),
        ("models: {demo: {max_batch: two}}", "models.demo.max_batch is 'two', expected a whole number"),
        ("models: {demo: {max_batch: true}}", "models.demo.max_batch is True, expected a whole number"),
        ("models: {demo: {max_batch: }}", "models.demo.max_batch is nil, expected a whole number"),
        ("models: {demo: {checkpoint: 3}}", "models.demo.checkpoint is 3, expected a path"),
        ("models: {demo: {handshake: robo}}", "models.demo.handshake is 'robo', expected 'openpi' or 'roboarena'"),
        ("models: {demo: {model: 5}}", "models.demo.model is 5, expected text"),
        ("models: {demo: fast}", "models.demo is 'fast', expected a map of options"),
        ("models: {3: {model: demo}}", "a name is 3, expected text"),
        ("models: {demo: }\ndefault: pi0", "default is 'pi0', expected one of demo"),
        ("models: {demo: }\nport: [1]", "port is a list of 1 items, expected a whole number"),
        ("models: {demo: }\ndefault: [demo]", "default is a list of 1 items, expected one of demo"),
        ('models: {"a b": {model: demo}}', "models: a policy cannot be called 'a b'"),
        ("models: {v1: {model: demo}}", "models: a policy cannot be called 'v1'"),
        ("models:\n  a: {model: demo}\n  a: {model: pi0}", "the key 'a' stands there twice"),
        ("models: {[a]: {model: demo}}", "is not YAML"),
        ("models: " + 3000 * "[", "is not YAML: it is nested too deeply"),
        ("models: {demo: }\nport: 2001-99-99", "'2001-99-99' cannot be read as timestamp"),
        ('models: {demo: }\nport: !!int "abc"', "'abc' cannot be read as int"),
        ('models: {demo: }\nport: !!int ""', "'' cannot be read as int"),
        ("models: {demo: }\nport: " + 5000 * "9", "...' cannot be read as int"),
        ('models: {demo: }\napi_keys_file: "~nouser/x"', "api_keys_file is '~nouser/x', and there is no such home"),
        ('models: {demo: {checkpoint: "a\\0b"}}', "models.demo.checkpoint is 'a\\x00b', expected a path"),
        ('models: {demo: {adapter: ["x=a\\0b"]}}', "models.demo.adapter is 'a\\x00b', expected a path"),
        ("a: [1", "is not YAML"),
        ("models: {demo: !!python/object/apply:os.getcwd []}", "is not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_place(content: str, text: str, file: Path):
    file.write_text(content)
    with pytest.raises(InvalidFile, match=re.escape(text)) as caught:
        read_serve_file(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_named(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_an_option_of_one_policy_is_refused_beside_a_file(file: Path, capsys: pytest.CaptureFixture[str]):
    file.write_text("models: {demo: }\n")
    assert main(["serve", str(file), "--max-batch", "2"]) == 2
    assert "--max-batch belongs to one policy: write it into" in capsys.readouterr().err


def test_an_unknown_model_in_a_file_is_refused_before_anything_is_loaded(
    file: Path, capsys: pytest.CaptureFixture[str]
):
    file.write_text("models: {arm: {model: pi5}}\n")
    assert main(["serve", str(file)]) == 2
    assert "model 'pi5' is not known, did you mean 'pi05'?" in capsys.readouterr().err


@pytest.mark.parametrize("host", ['"a\\0b"', 300 * "a"], ids=["with a NUL", "too long"])
def test_a_host_that_cannot_be_one_is_refused_in_one_sentence(
    host: str, file: Path, capsys: pytest.CaptureFixture[str]
):
    file.write_text(f"host: {host}\nmodels: {{demo: }}\n")
    assert main(["serve", str(file)]) == 2
    told = capsys.readouterr().err
    assert "host must be a host name or an address, got" in told
    assert told.count("\n") == 1


@pytest.mark.torch
def test_an_option_on_the_command_line_overrides_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file.write_text("port: 9000\nhost: localhost\nmodels: {a: {model: demo, seed: 3}}\n")
    served = {}
    monkeypatch.setattr("relay.server.app.serve", lambda offers, settings: served.update(offers=offers, of=settings))
    assert main(["serve", str(file), "--port", "0"]) == 0
    assert (served["of"].port, served["of"].host) == (0, "localhost")
    assert served["offers"]["a"].settings.seed == 3
