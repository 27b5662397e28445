"""Code in the store: named by its hash, and never given out under a hash that it does not have."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from millstream.errors import DamagedObject, UserError
from millstream.store import code, names
from millstream.store.code import get_code, put_code
from millstream.store.objects import open_store


def test_the_same_code_has_the_same_name_and_is_stored_once() -> None:
    store = open_store("memory://")
    sha = put_code(store, b"one")
    assert sha == hashlib.sha256(b"one").hexdigest()
    assert put_code(store, b"one") == sha
    other = put_code(store, b"two")
    assert sorted(item.name for item in store.list("")) == sorted([f"code/{sha}", f"code/{other}"])
    assert (get_code(store, sha), get_code(store, other)) == (b"one", b"two")


@pytest.mark.parametrize("found", [b"another", b"on", b""])
def test_code_that_was_altered_or_cut_short_is_named_and_not_used(tmp_path: Path, found: bytes) -> None:
    store = open_store(str(tmp_path))
    sha = put_code(store, b"one")
    (tmp_path / names.code(sha)).write_bytes(found)
    with pytest.raises(DamagedObject) as raised:
        get_code(store, sha)
    assert raised.value.name == f"code/{sha}"
    assert hashlib.sha256(found).hexdigest() in raised.value.found
    assert sha in raised.value.expected
    with pytest.raises(DamagedObject):
        put_code(store, b"one")


def test_code_that_is_not_there_is_named() -> None:
    with pytest.raises(DamagedObject, match=f"code/{'0' * 64}.*found nothing"):
        get_code(open_store("memory://"), "0" * 64)


@pytest.mark.parametrize("sha", ["", "abc", "../" * 21 + "a", "A" * 64, "0" * 64 + "\n", 7])
def test_what_is_no_hash_never_becomes_a_name(sha: str) -> None:
    with pytest.raises(UserError, match="expected the SHA-256"):
        get_code(open_store("memory://"), sha)


def test_code_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://")
    monkeypatch.setattr(code, "MAX_CODE_BYTES", 10)
    put_code(store, b"0123456789")
    with pytest.raises(UserError, match="has 11 bytes, and may have 10"):
        put_code(store, b"0123456789a")
    assert len(list(store.list(""))) == 1
