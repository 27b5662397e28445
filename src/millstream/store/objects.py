"""What a store must offer: six operations on named, immutable objects.

Rules
-----
- `create` is atomic: of any number of callers, in any processes, exactly one gets True for a name, and from then on
  everybody reads that caller's bytes, whole. The journal (G3) stands on this alone.
- `put` is atomic too: readers see nothing or all of it. Names of what is put are unique, so nothing is overwritten.
- After a success, a read by any process gives the bytes (read-after-write).
- `list` may miss objects that are being written, never ones whose write had returned before it began.
- Everything else may fail at any time, and then raises `StoreUnavailable`; a failed write may or may not have
  happened.

- A directory is made for its owner only (0700), unless `permissions` says "umask". What any process writes into a
  directory that only its owner can read is for the owner only, too (0700, 0600); in any other, it goes by the umask.

`obstore` gives these for a local directory, S3, GCS, Azure and memory. A local directory survives the death of any
process; as obstore does not call fsync, after a power loss it holds what the operating system had written by then.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, from_url

from millstream.errors import StoreUnavailable, UserError

Data = bytes | bytearray | memoryview

STAGING = "_staging/"
"""Where a directory keeps what is being written; the name is one that Spark's file sources do not read."""


PERMISSIONS = "permissions"
"""The option of a directory that says for whom it is made."""
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing; `age_s` by the clock of the store and of this machine."""

    name: str
    bytes: int
    age_s: float


class ObjectStore(Protocol):
    """Named immutable objects; see the rules above for what a backend promises."""

    uri: str

    def create(self, name: str, data: Data) -> bool:
        """Writes the object unless it exists. True if this call wrote it."""
        ...

    def put(self, name: str, data: Data) -> None:
        """Writes an object whose name nobody else uses."""
        ...

    def get(self, name: str) -> memoryview | None:
        """The bytes of an object, or None if there is none."""
        ...

    def get_ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview] | None:
        """Some bytes of an object, each from the first to before the last; fewer where the object has ended."""
        ...

    def list(self, prefix: str) -> Iterator[Listed]:
        """The objects below a prefix, in no order."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; those that are gone already do not matter."""
        ...

    def path(self, name: str) -> Path | None:
        """Where the object lies in this machine's file system, if that is where it is."""
        ...


class ObjectStoreBackend:
    """Any store that obstore can open."""

    def __init__(self, uri: str, backend: Any, root: Path | None, private: bool = False) -> None:
        self.uri, self._backend, self._root, self._private = uri, backend, root, private
        self._folders: set[str] = set()

    def create(self, name: str, data: Data) -> bool:
        try:
            if self._root is None:
                obstore.put(self._backend, name, data, mode="create", use_multipart=False)
            else:
                self._link(name, data)
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise _unavailable("create", self.uri, name, error) from error
        return True

    def put(self, name: str, data: Data) -> None:
        try:
            if self._root is None:
                obstore.put(self._backend, name, data)
            else:
                self._link(name, data)
        except (BaseError, OSError) as error:
            raise _unavailable("write", self.uri, name, error) from error

    def _link(self, name: str, data: Data) -> None:
        """Writes aside, then links: a process that dies in between leaves its rest where nobody reads."""
        staged = f"{STAGING}{secrets.token_hex(8)}"
        if self._private:
            self._make_folders(staged)
            self._make_folders(name)
        obstore.put(self._backend, staged, data)
        if self._private:
            assert self._root is not None
            (self._root / staged).chmod(_PRIVATE_FILE)
        try:
            obstore.rename(self._backend, staged, name, overwrite=False)
        except AlreadyExistsError:
            obstore.delete(self._backend, staged)
            raise

    def _make_folders(self, name: str) -> None:
        """The folders of an object, each with the mode of a private one, which `mkdir` gives only to the last."""
        assert self._root is not None
        folder = name.rpartition("/")[0]
        if folder in self._folders:
            return
        parts = folder.split("/")
        for count in range(1, len(parts) + 1):
            (self._root / "/".join(parts[:count])).mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
        self._folders.add(folder)

    def get(self, name: str) -> memoryview | None:
        try:
            return memoryview(obstore.get(self._backend, name).bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _unavailable("read", self.uri, name, error) from error

    def get_ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview] | None:
        try:
            if self._root is not None:
                return _read_file(self._root / name, spans)
            return self._read_object(name, spans)
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _unavailable("read", self.uri, name, error) from error

    def _read_object(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        try:
            found = obstore.get_ranges(self._backend, name, starts=starts, ends=ends, coalesce=0)
        except BaseError:
            size = obstore.head(self._backend, name)["size"]
            if max(starts) < size:
                raise
            return [memoryview(b"")] * len(spans)  # some begin behind its end, which is an error of the backend
        return [memoryview(data) for data in found]

    def list(self, prefix: str) -> Iterator[Listed]:
        now = time.time()
        try:
            for chunk in obstore.list(self._backend, prefix):
                for meta in chunk:
                    yield Listed(meta["path"], meta["size"], max(0.0, now - meta["last_modified"].timestamp()))
        except (BaseError, OSError) as error:
            raise _unavailable("list", self.uri, prefix, error) from error

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                obstore.delete(self._backend, name)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                raise _unavailable("delete", self.uri, name, error) from error

    def path(self, name: str) -> Path | None:
        return self._root / name if self._root is not None else None


def _read_file(path: Path, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return [memoryview(os.pread(descriptor, end - start, start)) for start, end in spans]
    finally:
        os.close(descriptor)


def open_store(uri: str, options: Mapping[str, str] | None = None, *, make: bool = True) -> ObjectStore:
    """Opens the store at a URI: a path or `file://` for a directory (made if missing), `s3://`, `gs://`, `az://`.

    `options` are obstore's settings for the backend (keys, region, endpoint); without them the environment's hold. Of a
    directory they may have `permissions`: "owner", the default, or "umask" for what the process gives to its files.
    `memory://` gives a new empty store that only this process sees. Without `make`, a directory must be there.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        path = Path(unquote(parts.path)) if parts.scheme else Path(uri)
        return _open_directory(path, make, _is_private(dict(options or {})))
    if parts.scheme == "memory":
        return ObjectStoreBackend(uri, MemoryStore(), None)
    try:
        given = {key: value for key, value in (options or {}).items() if key != PERMISSIONS}  # a directory's alone
        return ObjectStoreBackend(uri, _from_url(uri, given), None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # obstore panics at some settings, which is no Exception
        raise UserError(
            f"cannot open the store {uri!r}: {_first_line(error)}. Give a directory, file:///path, s3://bucket/path, "
            "gs://bucket/path, az://container/path, or memory:// in tests."
        ) from error


_CLIENT = {
    "allow_http": bool,
    "allow_invalid_certificates": bool,
    "connect_timeout": str,
    "timeout": str,
    "proxy_url": str,
}
"""Settings that obstore takes apart from those of the backend, and what they must be."""


def _from_url(uri: str, options: dict[str, str]) -> Any:
    client: dict[str, Any] = {}
    for key in [key for key in options if key.lower() in _CLIENT]:
        value = options.pop(key)
        client[key.lower()] = value.lower() == "true" if _CLIENT[key.lower()] is bool else value
    return from_url(uri, config=_any(options) or None, client_options=_any(client) or None)


def _is_private(options: Mapping[str, str]) -> bool:
    permissions = options.get(PERMISSIONS, "owner")
    if permissions not in ("owner", "umask"):
        raise UserError(f"permissions={permissions!r}: give 'owner' or 'umask'")
    return permissions == "owner"


def _open_directory(root: Path, make: bool, private: bool) -> ObjectStore:
    root = root.expanduser().absolute()
    if not make and not root.is_dir():
        raise StoreUnavailable(f"the store {root} is not there here; mount the same directory on every worker")
    try:
        if not root.is_dir():
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=_PRIVATE_FOLDER if private else 0o777, exist_ok=True)
        alone = not root.stat().st_mode & 0o077  # whoever writes there, from any process, goes by the directory
        return ObjectStoreBackend(root.as_uri(), LocalStore(root), root, alone)
    except (BaseError, OSError) as error:
        raise UserError(
            f"cannot use {root} as a store: {_first_line(error)}. Give a directory you may write to."
        ) from error


def _unavailable(verb: str, uri: str, name: str, error: Exception) -> StoreUnavailable:
    text = _first_line(error)
    advice = (
        "Free some space" if "os error 28" in text or "No space left" in text else "See that the store can be reached"
    )
    return StoreUnavailable(
        f"cannot {verb} {name!r} in the store {uri}: {text}. {advice}, then start the query again: "
        "it goes on from its last commit."
    )


def _any(value: Any) -> Any:
    return value  # obstore types the settings of each backend apart; which one it is, is the user's choice


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
