"""Files of users: what is not read, what a rename keeps, and what killed writers leave behind."""

import io
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

import kv_hf
from kv_hf import notices
from kv_hf.errors import InputFileError
from kv_hf.files import folders, processes, reading, unfinished, writing
from kv_hf.files.json_text import DEEPEST, parse_json
from kv_hf.printable import printable, tell

OLD, NEW = "old contents", "new contents"
posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


@pytest.fixture(autouse=True)
def _say_again():
    notices.forget()


# -- reading -------------------------------------------------------------------------------------------------


def special(kind, folder):
    path = folder / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 33)
    return path


@posix
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pipe", "must be a regular file, got a pipe"),
        ("endless", "must be a regular file, got a device"),
        ("folder", "must be a regular file, got a folder"),
        ("huge", "is too large: 8,589,934,592 bytes, at most 1,000 are read"),
    ],
)
def test_read_text_refuses_what_has_no_end(kind, says, tmp_path):
    path = special(kind, tmp_path)
    with pytest.raises(InputFileError, match=f"^thing '{path}' {says}$"):
        reading.read_text(path, 1000, "thing")


@posix
def test_read_bytes_stops_where_a_file_says_nothing_of_its_size():
    """/proc claims that its files are empty."""
    assert reading.read_bytes("/proc/self/stat", 10_000, "thing")
    with pytest.raises(InputFileError, match="too large: more than 3 bytes"):
        reading.read_bytes("/proc/self/stat", 3, "thing")


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
        ("[" * 100_000, "nested too deeply"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), f"nested deeper than {DEEPEST}"),
        ('{"a":' * 900 + "1" + "}" * 900, f"nested deeper than {DEEPEST}"),
        ('{"a": 1, "a": 2}', "the name 'a' occurs twice, with different values"),
        ("9" * 5000, "digits"),
        ("{", "Expecting"),
    ],
)
def test_parse_json_refuses_what_breaks_its_readers(text, says):
    with pytest.raises(ValueError, match=says):
        parse_json(text)


def test_parse_json_takes_what_configs_hold():
    assert parse_json('{"a": 1, "b": [0.0, Infinity], "a": 1}') == {"a": 1, "b": [0, float("inf")]}
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
    with pytest.raises(ValueError, match="occurs twice"):
        parse_json('{"a": 1, "a": 1}', strict=True)
    with pytest.raises(ValueError, match="NaN is not allowed"):
        parse_json("[NaN]", strict=True)


# -- what a terminal obeys -----------------------------------------------------------------------------------


def test_printable_writes_out_what_a_terminal_would_obey():
    assert printable("plain, \u00fcml\u00e4ut, \u4f60\u597d, \U0001f600") == (
        "plain, \u00fcml\u00e4ut, \u4f60\u597d, \U0001f600"
    )
    assert printable("\x1b]0;title\x07\x9b2J\r\x00\x7f") == r"\x1b]0;title\x07\x9b2J\r\x00\x7f"
    assert printable("gpt\u202e4\u200b\u2028") == r"gpt\u202e4\u200b\u2028"
    assert printable("\udc80") == r"\udc80"
    assert printable("a\n\tb\x1b", keep="\n") == "a\n\\tb\\x1b"
    assert len(printable("a" * 10**6)) == len(printable("\x1b" * 10**6)) == 10_000


def test_errors_and_notices_print_no_control_characters(caplog):
    error = kv_hf.CacheFileError("model '\x1b[2J' is none\nline two")
    assert str(error) == "model '\\x1b[2J' is none line two"
    notices.say_once("x", "model \x1b[2J")
    assert "model \\x1b[2J" in caplog.text
    with pytest.warns(kv_hf.KVCacheWarning, match=r"model \\x1b"):
        notices.warn_once("y", "model \x1b[2J")


def test_tell_writes_out_what_a_terminals_encoding_lacks(monkeypatch):
    for encoding, expected in (("ascii", b"\\u4f60 \\xfc\nb\n"), ("latin-1", b"\\u4f60 \xfc\nb\n")):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, newline="\n"))
        tell("\u4f60 \u00fc\nb")
        sys.stdout.flush()
        assert raw.getvalue() == expected


# -- writing -------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o400])
def test_replacing_keeps_the_mode_of_the_file_that_was_there(mode, tmp_path, umask):
    path = tmp_path / "file"
    path.write_text(OLD)
    path.chmod(mode)
    if not os.access(path, os.W_OK):
        with pytest.raises(PermissionError, match="may not be written"):
            writing.replace_text(path, NEW)
        return
    seen = []
    with writing.replacing(path) as file:
        file.write(NEW.encode())
        seen += [mode_of(other) for other in tmp_path.iterdir() if other != path]
    assert path.read_text() == NEW and mode_of(path) == mode
    assert seen == [0o600]  # nobody else reads it before it has its own mode


@posix
def test_replacing_gives_a_new_file_what_the_umask_leaves(tmp_path, umask):
    writing.replace_text(tmp_path / "file", NEW)
    assert mode_of(tmp_path / "file") == 0o640


@posix
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root")
def test_replacing_keeps_the_owner_where_it_may(tmp_path):
    path = tmp_path / "file"
    path.write_text(OLD)
    os.chown(path, 12345, 23456)
    path.chmod(0o640)
    writing.replace_text(path, NEW)
    found = path.stat()
    assert (found.st_uid, found.st_gid, mode_of(path)) == (12345, 23456, 0o640)


@posix
def test_replacing_gives_no_other_group_what_a_lost_group_could_read(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text(OLD)
    path.chmod(0o664)
    real = os.fstat

    def of_another_group(number):
        found = list(real(number))
        found[stat.ST_GID] += 1
        return os.stat_result(found)

    def refuse(*_):
        raise PermissionError("not a member")

    monkeypatch.setattr(os, "fstat", of_another_group)
    monkeypatch.setattr(os, "fchown", refuse)
    writing.replace_text(path, NEW)
    assert mode_of(path) == 0o644


@posix
def test_replacing_writes_where_a_link_leads_and_leaves_the_link(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, loose = tmp_path / "there" / "file", tmp_path / "link", tmp_path / "loose"
    target.write_text(OLD)
    target.chmod(0o600)
    link.symlink_to(target)
    writing.replace_text(link, NEW)
    assert link.is_symlink() and target.read_text() == NEW and mode_of(target) == 0o600
    loose.symlink_to(tmp_path / "there" / "none yet")
    writing.replace_text(loose, NEW)
    assert loose.is_symlink() and (tmp_path / "there" / "none yet").read_text() == NEW


@posix
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_replacing_never_takes_the_place_of_a_device_pipe_or_folder(kind, tmp_path):
    """As root a rename would put a file in the place of /dev/null."""
    path = special(kind, tmp_path)
    before = os.stat(path)
    with pytest.raises(OSError, match="give the name of a file"):
        writing.replace_text(path, NEW)
    assert os.stat(path).st_ino == before.st_ino and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["n" * 255, "\u00e9" * 127, "\u4f60" * 85, ".hidden", "a b"])
def test_replacing_takes_every_name_that_a_file_may_have(name, tmp_path):
    for text in (OLD, NEW):
        writing.replace_text(tmp_path / name, text)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with folders.becoming_folder(tmp_path / f"{name[:-1]}2") as folder:
        (folder / "file").write_text(NEW)
    assert (tmp_path / f"{name[:-1]}2" / "file").read_text() == NEW


@posix
def test_becoming_folder_keeps_the_mode_of_an_empty_folder(tmp_path, umask):
    (tmp_path / "mine").mkdir(0o700)
    for name, mode in (("mine", 0o700), ("new", 0o750)):
        with folders.becoming_folder(tmp_path / name) as folder:
            (folder / "file").write_text(NEW)
            assert mode_of(folder) == mode
        assert mode_of(tmp_path / name) == mode


# -- what killed writers leave -------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path):
    """The number of a process that is writing a file and a folder, and waits."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    reader, output = os.pipe()
    child = os.fork()
    if not child:
        try:
            with (
                writing.replacing(tmp_path / "file") as file,
                folders.becoming_folder(tmp_path / "folder") as folder,
            ):
                file.write(b"half")
                (folder / "inner").mkdir()
                (folder / "inner" / "weights").write_bytes(b"half")
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


def left_in(folder):
    return sorted(p.name for p in folder.iterdir() if unfinished.writer_of(p.name))


@posix
def test_what_a_killed_process_left_is_removed_by_the_next_writer(writer, tmp_path, caplog):
    (before,) = (name for name in left_in(tmp_path) if name.startswith("file."))
    assert len(left_in(tmp_path)) == 2
    writing.replace_text(tmp_path / "other", NEW)
    assert len(left_in(tmp_path)) == 2  # it is running
    assert not caplog.text
    os.kill(writer, signal.SIGKILL)
    os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    with folders.becoming_folder(tmp_path / "next") as folder:
        (folder / "file").write_text(NEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next", "other"]
    assert caplog.text.count("the unfinished files of killed processes") == 1
    assert before in caplog.text


@posix
def test_what_other_machines_and_other_programs_left_is_left_alone(tmp_path):
    writing.replace_text(tmp_path / "file", OLD)
    ended = subprocess.Popen(["true"])
    ended.wait()
    machine, boot, _, _ = processes.process_name().split("-")
    dead = f"{ended.pid}-1"
    names = {
        f"file.{machine}-{boot}-{dead}.0123456789abcdef.kv_hf-saving": False,
        f"a.b.c.{machine}-{boot}-{dead}.0123.kv_hf-converting": False,
        f"file.{'0' * 10}-{boot}-{dead}.0123456789abcdef.kv_hf-saving": True,  # another machine
        f"file.{machine}-{'0' * 8}-{dead}.0123456789abcdef.kv_hf-saving": True,  # another container
        f"file.{machine}-{boot}-{os.getppid()}-0.0123.kv_hf-saving": True,  # runs
        "file.0123456789abcdef.kv_hf-saving": True,  # of an earlier version
        f"file.{machine}-{boot}-{dead}.0123456789abcdef.other": True,
        f"file.{machine}-{boot}-{'9' * 30}-1.0123.kv_hf-saving": True,
    }
    for name in names:
        (tmp_path / name).write_text("half")
    writing.replace_text(tmp_path / "file", NEW)
    assert {path.name for path in tmp_path.iterdir()} == {
        "file",
        *(name for name, stays in names.items() if stays),
    }


@posix
def test_what_was_left_before_this_machine_was_started_is_removed(tmp_path, monkeypatch):
    machine, _, _, _ = processes.process_name().split("-")
    earlier = tmp_path / f"file.{machine}-{'0' * 8}-1-1.0123456789abcdef.kv_hf-saving"
    earlier.write_text("half")
    monkeypatch.setattr(processes, "_has_machine_id", lambda: True)
    monkeypatch.setattr(processes, "_boot_time", lambda: time.time() - 100)
    assert not unfinished.remove_dead(tmp_path)
    os.utime(earlier, (1, 1))
    monkeypatch.setattr(processes, "_has_machine_id", lambda: False)
    assert not unfinished.remove_dead(tmp_path)  # which machine it is, is not certain
    monkeypatch.setattr(processes, "_has_machine_id", lambda: True)
    assert unfinished.remove_dead(tmp_path) == [earlier.name]


@posix
def test_a_number_that_another_process_has_by_now_is_a_dead_one():
    machine, boot, pid, begin = processes.process_name().split("-")
    assert not processes.is_dead(f"{machine}-{boot}-{pid}-{begin}", 0)
    assert processes.is_dead(f"{machine}-{boot}-{pid}-{int(begin) - 1}", 0)


def test_links_in_the_place_of_what_was_left_lead_nowhere(tmp_path):
    """Removal takes the link away, never what it leads to."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text(OLD)
    machine, boot, pid, begin = processes.process_name().split("-")
    link = tmp_path / f"x.{machine}-{boot}-{pid}-{int(begin) - 1}.0123.kv_hf-converting"
    link.symlink_to(tmp_path / "kept")
    unfinished.remove_dead(tmp_path)
    assert (tmp_path / "kept" / "file").read_text() == OLD and not link.is_symlink()


def test_other_threads_of_this_process_keep_what_they_write(tmp_path):
    began, go_on = threading.Event(), threading.Event()

    def write():
        with writing.replacing(tmp_path / "slow") as file:
            file.write(b"half")
            began.set()
            go_on.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    assert began.wait(30)
    writing.replace_text(tmp_path / "fast", NEW)
    go_on.set()
    thread.join()
    assert (tmp_path / "slow").read_text() == "half"


def test_what_this_process_could_not_remove_is_removed_by_its_next_writer(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="not now"):
            writing.replace_text(tmp_path / "file", NEW)
    assert len(left_in(tmp_path)) == 1
    writing.replace_text(tmp_path / "other", NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@posix
def test_a_scratch_folder_is_its_processes_alone(tmp_path):
    with folders.scratch_folder(tmp_path / "target") as scratch:
        assert mode_of(scratch) == 0o700 and unfinished.writer_of(scratch.name)
        (scratch / "file").write_text(NEW)
    assert not list(tmp_path.iterdir())


def test_process_name_is_another_one_in_a_forked_child():
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    reader, output = os.pipe()
    child = os.fork()
    if not child:
        os.write(output, processes.process_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    name = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(output)
    assert name != processes.process_name() and name.split("-")[2] == str(child)
    assert processes.is_dead(name, 0)
