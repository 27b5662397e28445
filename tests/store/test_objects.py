"""One contract, one suite: what every backend must do. S3 and its kin run where MILLSTREAM_TEST_STORE names one."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.errors import StoreUnavailable, UserError
from millstream.store.objects import ObjectStore, open_store


@pytest.fixture(params=["directory", "memory", "named"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "directory":
        yield open_store(str(tmp_path / "a store"))
    elif request.param == "memory":
        yield open_store("memory://")
    else:
        uri = os.environ.get("MILLSTREAM_TEST_STORE")
        if not uri:
            pytest.skip("MILLSTREAM_TEST_STORE is not set")
        yield open_store(f"{uri.rstrip('/')}/{secrets.token_hex(6)}")


def test_of_many_creators_exactly_one_wins_and_all_read_its_bytes(store: ObjectStore) -> None:
    wins: list[bytes] = []

    def create(data: bytes) -> None:
        if store.create("journal/7", data):
            wins.append(data)

    threads = [threading.Thread(target=create, args=(b"driver %d" % i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert bytes(store.get("journal/7") or b"") == wins[0]
    assert not store.create("journal/7", b"late")


def test_what_was_put_is_read_and_listed(store: ObjectStore) -> None:
    store.put("segments/a/b", b"x" * 100_000)
    store.put("segments/c", memoryview(b"yz"))
    assert bytes(store.get("segments/a/b") or b"") == b"x" * 100_000
    found = {item.name: item for item in store.list("segments/")}
    assert set(found) == {"segments/a/b", "segments/c"}
    assert found["segments/c"].bytes == 2
    assert found["segments/c"].age_s < 600
    assert list(store.list("other/")) == []


def test_what_is_not_there_reads_as_none(store: ObjectStore) -> None:
    assert store.get("nothing/here") is None


def test_deleting_twice_does_not_matter(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    store.delete(["a/b", "a/never"])
    store.delete(["a/b"])
    assert store.get("a/b") is None


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    assert store.create("empty", b"")
    assert bytes(store.get("empty") or b"no") == b"" or store.get("empty") is not None
    assert not store.create("empty", b"full")


def test_a_directory_is_seen_by_other_processes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    code = (
        f"from millstream.store.objects import open_store; print(open_store({str(tmp_path)!r}).create('k', b'theirs'))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "True"
    assert not store.create("k", b"ours")
    assert bytes(store.get("k") or b"") == b"theirs"


def test_a_path_and_its_uri_are_one_store(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).uri == open_store(tmp_path.as_uri()).uri


def test_what_cannot_be_a_store_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="cannot use .*file as a store.*Give a directory"):
        open_store(str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot open the store 'nfs://x/y'.*s3://bucket"):
        open_store("nfs://x/y")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_no_space_left_says_so(tmp_path: Path) -> None:
    """A real file system without space: a tiny one in memory, where we may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        store = open_store(str(small))
        with pytest.raises(StoreUnavailable, match=r"No space left.*Free some space"):
            for number in range(8):
                store.put(f"segments/{number}", b"x" * 32_000)
        assert store.get("segments/7") is None
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_settings_of_the_connection_and_of_the_backend_are_told_apart() -> None:
    """No server is asked for here: S3 is only named."""
    options = {"access_key_id": "me", "secret_access_key": "secret", "region": "here", "endpoint": "http://127.0.0.1:9"}
    opened = open_store("s3://bucket/path", {**options, "allow_http": "true", "timeout": "1s"})
    assert opened.path("journal/0") is None
    with pytest.raises(UserError, match="cannot open the store 's3://bucket/path': .*nonsense.*not valid"):
        open_store("s3://bucket/path", {"nonsense": "x"})


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_a_directory_is_made_for_its_owner_only(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = open_store(str(tmp_path / "deep" / "store"))
        store.put("a/b/c", b"1")
        store.create("journal/1", b"2")
    finally:
        os.umask(before)
    root = tmp_path / "deep" / "store"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_directory_is_shared_if_it_is_told_to_be(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = open_store(str(tmp_path / "store"), {"permissions": "umask"})
        store.put("a/b", b"1")
        kept = tmp_path / "made"
        kept.mkdir(mode=0o755)
        open_store(str(kept)).put("b/c", b"2")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "store" / "a" / "b").stat().st_mode) == 0o644
    assert stat.S_IMODE(kept.stat().st_mode) == 0o755, "what was there keeps its mode"
    assert stat.S_IMODE((kept / "b" / "c").stat().st_mode) == 0o644, "whoever writes there goes by it"
    open_store("s3://bucket/path", {"permissions": "umask", "region": "eu-central-1"})  # a directory's alone
    with pytest.raises(UserError, match="permissions='everyone': give 'owner' or 'umask'"):
        open_store(str(tmp_path / "other"), {"permissions": "everyone"})
