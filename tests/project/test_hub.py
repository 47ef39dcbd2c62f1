"""Names of models: known, unknown and unreachable ones are told apart in seconds, and by one file."""

import socket

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

import kv_hf
from kv_hf import doctor, hub
from kv_hf.evaluation.memory import Request
from kv_hf.evaluation.models import check_model_name

NAME = "nobody/no-such-model"


@pytest.fixture
def connections(monkeypatch):
    """No connection is opened; those that are asked for are listed."""
    asked = []

    def refuse(address, **_):
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    return asked


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("./nothing", "there is no such folder"),
        ("/no/such/folder", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("not a name/at all", "nor a name that the hub could have"),
    ],
)
def test_why_not_model_asks_nobody_for_what_the_hub_cannot_have(name, reason, connections):
    assert reason in hub.why_not_model(name)
    assert not connections


def test_why_not_model_tells_folders_without_a_model(tmp_path, connections):
    assert hub.why_not_model(str(tmp_path)) == "a folder without a config.json"
    (tmp_path / "config.json").write_text("{}")
    assert hub.why_not_model(str(tmp_path)) is None
    assert hub.why_not_model(str(tmp_path / "config.json")) == "a file, and no folder of a model"
    assert not connections


def test_why_not_model_asks_once_and_names_what_cannot_be_reached(connections):
    """The hub's own client tried for half a minute, for every file."""
    assert "huggingface.co cannot be reached: no network" in hub.why_not_model(NAME)
    assert len(connections) == 1


def test_why_not_model_opens_no_connection_offline(monkeypatch, connections):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids asking the hub" in hub.why_not_model(NAME)
    assert not connections


def test_why_not_model_asks_nobody_for_a_cached_model(monkeypatch, tmp_path, connections):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "c"))
    assert hub.why_not_model(NAME) is None
    assert hub.cached_config(NAME) == tmp_path / "c"
    assert not connections


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RepositoryNotFoundError, "neither a folder nor a model of the hub"),
        (GatedRepoError, f"accept its terms at https://huggingface.co/{NAME}"),
        (EntryNotFoundError, "on the hub, but without a config.json"),
        (TimeoutError, None),
    ],
)
def test_why_not_model_says_what_the_hub_answers(error, reason, monkeypatch):
    class Socket:
        def close(self):
            pass

    def answer(*_, **__):
        if error is TimeoutError:
            raise TimeoutError
        raise error.__new__(
            error, "as the hub says"
        )  # whatever responses look like in this version

    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: Socket())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    found = hub.why_not_model(NAME)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (check_model_name, ValueError),
        (lambda name: Request(name, "paged_int4", 64).check(), ValueError),
        (doctor.report_model, kv_hf.KVCacheError),
        (lambda name: kv_hf.plan(name), kv_hf.KVCacheError),
        (lambda name: kv_hf.convert_to_gqa(name, "out", 1), kv_hf.ConversionError),
    ],
    ids=["evaluation", "footprint", "doctor", "memory", "convert-gqa"],
)
def test_every_command_refuses_an_unknown_name_at_the_first_connection(call, error, connections):
    with pytest.raises(error, match=rf"'{NAME}'.*huggingface.co cannot be reached: no network"):
        call(NAME)
    assert len(connections) == 1
