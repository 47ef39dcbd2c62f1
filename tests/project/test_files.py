"""Files of users, and names of models: what is not read, what a rename keeps, what killed writers leave behind, what the hub is asked."""

import os
import signal
import socket
import stat
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

import kv_hf
from kv_hf import doctor, files, hub
from kv_hf.errors import InputFileError
from kv_hf.printable import printable

OLD, NEW = "old contents", "new contents"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


# -- reading -------------------------------------------------------------------------------------------------


def special(kind, folder):
    path = folder / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 33)
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pipe", "must be a regular file"),
        ("endless", "must be a regular file"),
        ("huge", "is too large: 8,589,934,592 bytes, at most 1,000 are read"),
    ],
)
def test_read_text_refuses_what_has_no_end(kind, says, tmp_path):
    path = special(kind, tmp_path)
    with pytest.raises(InputFileError, match=f"^thing '{path}' {says}$"):
        files.read_text(path, 1000, "thing")


def test_read_text_takes_the_mark_and_the_line_ends_of_other_systems(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert files.read_text(path, 100, "thing") == "one\ntwo\nthree\n"
    path.write_bytes(b"\xff")
    with pytest.raises(InputFileError, match="thing '.*' is not UTF-8"):
        files.read_text(path, 100, "thing")


@pytest.mark.parametrize(
    ("text", "says"),
    [("[" * 10**5, "is no JSON"), ('{"a": 1', "is no JSON"), ("[1]", "must hold a JSON object")],
    ids=["deep", "cut", "list"],
)
def test_read_json_object_refuses_everything_else(text, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputFileError, match=f"config '.*' {says}"):
        files.read_json_object(path, 1 << 20, "config")


# -- what a terminal obeys -----------------------------------------------------------------------------------


def test_printable_writes_out_what_a_terminal_would_obey():
    assert printable("plain, \u00fc, \u4f60, \U0001f600") == "plain, \u00fc, \u4f60, \U0001f600"
    assert printable("\x1b]0;title\x07\x9b2J\r\x00") == r"\x1b]0;title\x07\x9b2J\r\x00"
    assert printable("gpt\u202e4\u200b\udc80") == r"gpt\u202e4\u200b\udc80"
    assert len(printable("\x1b" * 10**6)) == 10_000
    assert str(kv_hf.CacheFileError("'\x1b[2J'\nline two")) == "'\\x1b[2J' line two"


# -- writing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_replacing_writes_aside_where_a_link_leads_and_keeps_the_mode(mode, tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text(OLD)
    path.chmod(mode)
    link.symlink_to(path)

    def write(fail):
        with files.replacing(link) as aside:
            aside.write_text(NEW)
            assert path.read_text() == OLD and mode_of(aside.parent) == 0o700
            assert aside.parent.parent == tmp_path
            if fail:
                raise KeyError

    with pytest.raises(KeyError):
        write(fail=True)
    assert path.read_text() == OLD and names_in(tmp_path) == {"file", "link"}
    write(fail=False)
    assert path.read_text() == NEW and mode_of(path) == mode and link.is_symlink()


def test_replacing_obeys_the_umask_and_never_takes_the_place_of_a_pipe(tmp_path):
    """As root a rename would put a file in the place of /dev/null: a pipe stands for it here, which is the test's own."""
    before = os.umask(0o027)
    try:
        files.replace_text(tmp_path / "new", NEW)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new") == 0o640
    path = special("pipe", tmp_path)
    with pytest.raises(OSError, match="give the name of a file"):
        files.replace_text(path, NEW)
    assert path.is_fifo() and names_in(tmp_path) == {"new", "pipe"}


@pytest.mark.parametrize("name", ["n" * 255, "\u4f60" * 85, ".a b"], ids=["long", "wide", "short"])
def test_files_and_folders_take_every_name_that_they_may_have(name, tmp_path):
    files.replace_text(tmp_path / name, NEW)
    with files.becoming_folder(tmp_path / f"{name[:-1]}2") as folder:
        (folder / "file").write_text(NEW)
    with files.scratch_folder(tmp_path / name) as scratch:
        assert mode_of(scratch) == 0o700 and scratch.name.endswith(files.UNFINISHED)
        (scratch / "file").write_text(NEW)
    assert names_in(tmp_path) == {name, f"{name[:-1]}2"}


# -- what killed writers leave -------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path):
    """The number of a process that is writing a file and a folder, and waits."""
    reader, output = os.pipe()
    child = os.fork()
    if not child:
        try:
            with (
                files.replacing(tmp_path / "file") as aside,
                files.becoming_folder(tmp_path / "folder") as folder,
            ):
                aside.write_bytes(b"half")
                (folder / "weights").write_bytes(b"half")
                os.write(output, b"written")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(reader, 7) == b"written"
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(output)


def test_what_a_killed_process_left_is_removed_by_the_next_writer(writer, tmp_path, caplog):
    files.replace_text(tmp_path / "other", NEW)
    assert len(names_in(tmp_path)) == 3 and not caplog.text  # it is running
    os.kill(writer, signal.SIGKILL)
    os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    with files.becoming_folder(tmp_path / "next") as folder:
        (folder / "file").write_text(NEW)
    assert names_in(tmp_path) == {"next", "other"}
    assert caplog.text.count("what killed processes left unfinished") == 1


def test_what_other_programs_left_is_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    link = f"link{files.UNFINISHED}"
    (tmp_path / link).symlink_to(tmp_path / "kept")
    (tmp_path / "file.other").write_text("half")
    files.replace_text(tmp_path / "file", NEW)
    assert names_in(tmp_path) == {"file", "file.other", "kept", link}


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
    """A "~" that no shell has expanded is no folder for those who load the model either."""
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for name in ("/no/such/folder", "a/b/c", "not a name/at all", f"~/{tmp_path.name}"):
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
