"""Files of users: what is not read, what a rename keeps, and what killed writers leave behind."""

import os
import signal
import stat
import subprocess

import pytest

import kv_hf
from kv_hf.errors import InputFileError
from kv_hf.files import folders, processes, reading, unfinished, writing
from kv_hf.files.json_text import DEEPEST, parse_json
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
        ("pipe", "must be a regular file, got a pipe"),
        ("endless", "must be a regular file, got a device"),
        ("huge", "is too large: 8,589,934,592 bytes, at most 1,000 are read"),
    ],
)
def test_read_text_refuses_what_has_no_end(kind, says, tmp_path):
    path = special(kind, tmp_path)
    with pytest.raises(InputFileError, match=f"^thing '{path}' {says}$"):
        reading.read_text(path, 1000, "thing")


def test_read_text_takes_the_mark_and_the_line_ends_of_other_systems(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert reading.read_text(path, 100, "thing") == "one\ntwo\nthree\n"
    path.write_bytes(b"\xff")
    with pytest.raises(InputFileError, match="thing '.*' is not UTF-8"):
        reading.read_text(path, 100, "thing")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), f"nested deeper than {DEEPEST}"),
        ('{"a": 1, "a": 2}', "the name 'a' occurs twice, with different values"),
        ("9" * 5000, "digits"),
    ],
    ids=["deep", "twice", "long"],
)
def test_parse_json_refuses_what_breaks_its_readers(text, says):
    with pytest.raises(ValueError, match=says):
        parse_json(text)
    assert parse_json('{"a": 1, "b": [0.0, Infinity], "a": 1}') == {"a": 1, "b": [0, float("inf")]}


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
    with writing.replacing(path) as file:
        file.write(NEW.encode())
        (aside,) = (mode_of(other) for other in tmp_path.iterdir() if other != path)
        assert path.read_text() == OLD and aside == 0o600
    assert path.read_text() == NEW and mode_of(path) == mode
    writing.replace_text(tmp_path / "new", NEW)
    assert mode_of(tmp_path / "new") == 0o640


def test_replacing_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text(OLD)

    def fail():
        with writing.replacing(path) as file:
            file.write(NEW.encode())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == OLD and list(tmp_path.iterdir()) == [path]


def test_replacing_writes_where_a_link_leads_and_leaves_the_link(tmp_path):
    target, link = tmp_path / "file", tmp_path / "link"
    target.write_text(OLD)
    link.symlink_to(target)
    writing.replace_text(link, NEW)
    assert link.is_symlink() and target.read_text() == NEW


def test_replacing_never_takes_the_place_of_a_device(tmp_path):
    """As root a rename would put a file in the place of /dev/null."""
    path = special("endless", tmp_path)
    with pytest.raises(OSError, match="give the name of a file"):
        writing.replace_text(path, NEW)
    assert not path.is_file() and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["n" * 255, "\u4f60" * 85, ".a b"], ids=["long", "wide", "short"])
def test_files_and_folders_take_every_name_that_they_may_have(name, tmp_path):
    writing.replace_text(tmp_path / name, NEW)
    with folders.becoming_folder(tmp_path / f"{name[:-1]}2") as folder:
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
                writing.replacing(tmp_path / "file") as file,
                folders.becoming_folder(tmp_path / "folder") as folder,
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
        return [path.name for path in tmp_path.iterdir() if unfinished.writer_of(path.name)]

    assert len(left()) == 2
    writing.replace_text(tmp_path / "other", NEW)
    assert len(left()) == 2 and not caplog.text  # it is running
    os.kill(writer, signal.SIGKILL)
    os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    with folders.becoming_folder(tmp_path / "next") as folder:
        (folder / "file").write_text(NEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next", "other"]
    assert caplog.text.count("the unfinished files of killed processes") == 1


def test_what_other_machines_and_other_programs_left_is_left_alone(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    machine, boot, pid, begin = processes.process_name().split("-")
    dead = f"{ended.pid}-1"
    names = {
        f"a.b.{machine}-{boot}-{dead}.0123.kv_hf-converting": False,
        f"file.{machine}-{boot}-{pid}-{int(begin) - 1}.0123.kv_hf-saving": False,  # an earlier one
        f"file.{'0' * 10}-{boot}-{dead}.0123.kv_hf-saving": True,  # of another machine
        f"file.{machine}-{boot}-{os.getppid()}-0.0123.kv_hf-saving": True,  # runs
        f"file.{machine}-{boot}-{dead}.0123.other": True,
    }
    for name in names:
        (tmp_path / name).write_text("half")
    (tmp_path / "kept").mkdir()
    link = tmp_path / f"x.{machine}-{boot}-{dead}.0123.kv_hf-converting"
    link.symlink_to(tmp_path / "kept")  # goes; what it leads to stays
    writing.replace_text(tmp_path / "file", NEW)
    stay = {name for name, stays in names.items() if stays}
    assert {path.name for path in tmp_path.iterdir()} == {"file", "kept", *stay}


def test_a_scratch_folder_is_its_processes_alone(tmp_path):
    with folders.scratch_folder(tmp_path / "target") as scratch:
        assert mode_of(scratch) == 0o700 and unfinished.writer_of(scratch.name)
        (scratch / "file").write_text(NEW)
    assert not list(tmp_path.iterdir())
