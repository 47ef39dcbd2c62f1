"""Files of users: what is not read, what a rename keeps, and what killed writers leave behind."""

import os
import signal
import stat

import pytest

import kv_hf
from kv_hf import files
from kv_hf.errors import InputFileError
from kv_hf.printable import printable

OLD, NEW = "old contents", "new contents"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


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
def test_replacing_writes_aside_for_nobody_else_and_keeps_the_mode(mode, tmp_path, umask):
    path = tmp_path / "file"
    path.write_text(OLD)
    path.chmod(mode)
    with files.replacing(path) as file:
        file.write(NEW.encode())
        (aside,) = (mode_of(other) for other in tmp_path.iterdir() if other != path)
        assert path.read_text() == OLD and aside == 0o600
    assert path.read_text() == NEW and mode_of(path) == mode
    files.replace_text(tmp_path / "new", NEW)
    assert mode_of(tmp_path / "new") == 0o640


def test_replacing_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text(OLD)

    def fail():
        with files.replacing(path) as file:
            file.write(NEW.encode())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == OLD and list(tmp_path.iterdir()) == [path]


def test_replacing_writes_where_a_link_leads_and_leaves_the_link(tmp_path):
    target, link = tmp_path / "file", tmp_path / "link"
    target.write_text(OLD)
    link.symlink_to(target)
    files.replace_text(link, NEW)
    assert link.is_symlink() and target.read_text() == NEW


def test_replacing_never_takes_the_place_of_a_device(tmp_path):
    """As root a rename would put a file in the place of /dev/null."""
    path = special("endless", tmp_path)
    with pytest.raises(OSError, match="give the name of a file"):
        files.replace_text(path, NEW)
    assert not path.is_file() and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["n" * 255, "\u4f60" * 85, ".a b"], ids=["long", "wide", "short"])
def test_files_and_folders_take_every_name_that_they_may_have(name, tmp_path):
    files.replace_text(tmp_path / name, NEW)
    with files.becoming_folder(tmp_path / f"{name[:-1]}2") as folder:
        (folder / "file").write_text(NEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, f"{name[:-1]}2"])


# -- what killed writers leave -------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path):
    """The number of a process that is writing a file and a folder, and waits."""
    reader, output = os.pipe()
    child = os.fork()
    if not child:
        try:
            with (
                files.replacing(tmp_path / "file") as file,
                files.becoming_folder(tmp_path / "folder") as folder,
            ):
                file.write(b"half")
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
    def left():
        return [path.name for path in tmp_path.iterdir() if path.name.endswith(files.UNFINISHED)]

    assert len(left()) == 2
    files.replace_text(tmp_path / "other", NEW)
    assert len(left()) == 2 and not caplog.text  # it is running
    os.kill(writer, signal.SIGKILL)
    os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    with files.becoming_folder(tmp_path / "next") as folder:
        (folder / "file").write_text(NEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next", "other"]
    assert caplog.text.count("what killed processes left unfinished") == 1


def test_what_other_programs_left_is_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / f"link{files.UNFINISHED}").symlink_to(tmp_path / "kept")
    (tmp_path / "file.other").write_text("half")
    files.replace_text(tmp_path / "file", NEW)
    assert {path.name for path in tmp_path.iterdir()} == {
        "file",
        "file.other",
        "kept",
        f"link{files.UNFINISHED}",
    }


def test_a_scratch_folder_is_its_processes_alone(tmp_path):
    with files.scratch_folder(tmp_path / "target") as scratch:
        assert mode_of(scratch) == 0o700 and scratch.name.endswith(files.UNFINISHED)
        (scratch / "file").write_text(NEW)
    assert not list(tmp_path.iterdir())
