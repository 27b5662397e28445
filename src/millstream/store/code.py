"""Code in the store: objects that are named by the SHA-256 of their bytes.

Rules
-----
- The same bytes have the same name, so putting them twice is putting them once, and an object never changes.
- Nothing is given out whose bytes do not have the hash they were asked for by. SHA-256, unlike the digests of segments,
  finds forgeries too: who knows the hash from a place that he trusts, can trust the code.
- A hash from elsewhere becomes part of a name only if it looks like one.
"""

from __future__ import annotations

import hashlib
import re

from millstream.errors import DamagedObject, UserError
from millstream.store import names
from millstream.store.objects import ObjectStore

MAX_CODE_BYTES = 64 << 20

_SHA = re.compile(r"[0-9a-f]{64}")


def sha_of(data: bytes) -> str:
    """The SHA-256 of some bytes, in 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def put_code(store: ObjectStore, data: bytes) -> str:
    """Stores code; the hash that it is known by from now on.

    >>> from millstream.store.objects import open_store
    >>> store = open_store("memory://")
    >>> sha = put_code(store, b"PK...")
    >>> get_code(store, sha)
    b'PK...'
    """
    if len(data) > MAX_CODE_BYTES:
        raise UserError(
            f"the code has {len(data):,} bytes, and may have {MAX_CODE_BYTES:,}: leave out data that it can read from "
            "elsewhere, or install it on the workers"
        )
    sha = sha_of(data)
    if not store.create(names.code(sha), data):
        get_code(store, sha)  # what is there already may have been damaged since
    return sha


def get_code(store: ObjectStore, sha: str) -> bytes:
    """The code of a hash."""
    name = names.code(checked_sha(sha))
    found = store.get(name)
    if found is None:
        raise DamagedObject(name, "nothing", f"code with SHA-256 {sha}")
    data = bytes(found)
    if sha_of(data) != sha:
        raise DamagedObject(name, f"{len(data)} bytes with SHA-256 {sha_of(data)}", f"SHA-256 {sha}")
    return data


def checked_sha(sha: str) -> str:
    """Refuses what is not a hash of code."""
    if not isinstance(sha, str) or not _SHA.fullmatch(sha):
        raise UserError(f"found {str(sha)[:100]!r}, expected the SHA-256 of code, in 64 hexadecimal digits")
    return sha
