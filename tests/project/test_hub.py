"""Names of models: known, unknown and unreachable ones are told apart in seconds, and by one file."""

import socket
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

import kv_hf
from kv_hf import doctor, hub

NAME = "nobody/no-such-model"


@pytest.fixture
def connections(monkeypatch):
    """No connection is opened; those that are asked for are listed."""
    asked = []

    def refuse(address, **_):
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    return asked


def test_why_not_model_asks_nobody_for_what_it_can_know(tmp_path, monkeypatch, connections):
    for name in ("/no/such/folder", "a/b/c", "not a name/at all"):
        reasons = ("there is no such folder", "nor a name that the hub could have")
        assert hub.why_not_model(name).endswith(reasons)
    assert hub.why_not_model(str(tmp_path)) == "a folder without a config.json"
    (tmp_path / "config.json").write_text("{}")
    assert hub.why_not_model(str(tmp_path)) is None
    assert hub.why_not_model(str(tmp_path / "config.json")) == "a file, and no folder of a model"
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE forbids asking the hub" in hub.why_not_model(NAME)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "c"))
    assert hub.why_not_model(NAME) is None and hub.cached_config(NAME) == tmp_path / "c"
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
    def answer(*_, **__):
        raise error.__new__(error, "as the hub says")  # whatever responses look like

    opened = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: opened)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    found = hub.why_not_model(NAME)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "call",
    [doctor.report_model, kv_hf.plan, lambda name: kv_hf.convert_to_gqa(name, "out", 1)],
    ids=["doctor", "memory", "convert-gqa"],
)
def test_every_command_refuses_an_unknown_name_at_the_first_connection(call, connections):
    """The hub's own client tried for half a minute, for every file."""
    says = rf"'{NAME}'.*huggingface.co cannot be reached: no network"
    with pytest.raises(kv_hf.KVCacheError, match=says):
        call(NAME)
    assert len(connections) == 1
