"""The cache of compiled kernels uses only files that are whole, unchanged and of this user. Called by pytest."""

import os
import threading
import warnings

import pytest

from thunder_moe.kernels import code_cache

KEY = "0123456789abcdef" * 4
CONTENT = b"name\0" + bytes(range(256)) * 100


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the file of KEY, with CONTENT."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert code_cache.read(KEY) is None
    code_cache.write(KEY, CONTENT)
    (file,) = (tmp_path / "thunder_moe").iterdir()
    assert code_cache.read(KEY) == CONTENT
    return file


@pytest.mark.parametrize("size", [0, 1, 31, 32, 40, -1])
def test_a_truncated_file_is_none_and_is_written_anew(kept, size):
    kept.write_bytes(kept.read_bytes()[:size])
    assert code_cache.read(KEY) is None
    code_cache.write(KEY, CONTENT)
    assert code_cache.read(KEY) == CONTENT


@pytest.mark.parametrize("at", [0, 31, 32, 40, -1])
def test_a_changed_byte_is_noticed(kept, at):
    content = bytearray(kept.read_bytes())
    content[at] ^= 1
    kept.write_bytes(content)
    assert code_cache.read(KEY) is None


def test_a_file_belongs_to_its_key(kept):
    other = KEY[::-1]
    kept.rename(kept.with_name(f"{other[:32]}.code"))
    assert code_cache.read(other) is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_only_files_of_this_user_are_used(kept, monkeypatch):
    for mode in (0o620, 0o602):
        kept.chmod(mode)
        assert code_cache.read(KEY) is None
    kept.chmod(0o644)
    assert code_cache.read(KEY) == CONTENT
    monkeypatch.setattr(os, "getuid", lambda: os.stat(kept).st_uid + 1)
    assert code_cache.read(KEY) is None


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be cached in .*file.*set XDG_CACHE_HOME"):
        code_cache.write(KEY, CONTENT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code_cache.write(KEY, CONTENT)
    assert code_cache.read(KEY) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(kept):
    kept.unlink()
    os.mkfifo(kept)
    os.mkfifo(kept.with_suffix(".lock"))
    assert code_cache.read(KEY) is None
    with code_cache.one_process(KEY, "compiles"):
        code_cache.write(KEY, CONTENT)
    assert code_cache.read(KEY) == CONTENT


def test_the_lock_does_not_follow_a_link(kept, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("of another program")
    kept.with_suffix(".lock").symlink_to(victim)
    with code_cache.one_process(KEY, "compiles"):
        pass
    assert victim.read_text() == "of another program"


def test_a_holder_that_was_stopped_is_not_waited_for_without_an_end(kept, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(code_cache, "_PATIENCE", 0.1)
    held = []

    def refuse(file, flags):
        held.append(flags)
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with code_cache.one_process(KEY, "compiles kernels"):
        assert "waiting for another process, which compiles kernels" in caplog.text
        assert "not waiting any longer" in caplog.text
    assert held
    assert all(flags & fcntl.LOCK_NB for flags in held)


def test_nothing_is_left_of_a_write_that_fails(kept, monkeypatch):
    def fail(*paths):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="no space left"):
        code_cache.write(KEY, CONTENT[::-1])
    assert list(kept.parent.iterdir()) == [kept]
    assert code_cache.read(KEY) == CONTENT


def test_without_a_home_nothing_is_kept(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(code_cache.Path, "home", nowhere)
    monkeypatch.setattr(code_cache, "_unwritable", set())
    with pytest.warns(UserWarning, match="no home directory.*set XDG_CACHE_HOME"):
        code_cache.write(KEY, CONTENT)
    assert code_cache.read(KEY) is None


def test_a_relative_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    for root in ("cache", "./cache", ".", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", root)
        assert code_cache.folder() == tmp_path / "home" / ".cache" / "thunder_moe"


def test_a_write_removes_what_a_killed_one_left(kept):
    old, new = kept.with_name("killed.0.part"), kept.with_name("running.1.part")
    for part in (old, new):
        part.write_bytes(CONTENT)
    os.utime(old, (0, 0))
    code_cache.write(KEY, CONTENT)
    assert set(kept.parent.iterdir()) == {kept, new}


def test_writers_at_once_leave_whole_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content, errors, found = CONTENT * 20, [], []

    def write():
        try:
            for _ in range(30):
                code_cache.write(KEY, content)
                found.append(code_cache.read(KEY))
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    assert not errors
    assert all(each == content for each in found)
    assert len(list((tmp_path / "thunder_moe").iterdir())) == 1
