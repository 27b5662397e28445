"""Code objects of a store, by their hash. (The helper's version takes this one's place.)"""

from __future__ import annotations

import hashlib

from millstream.errors import DamagedObject
from millstream.store.objects import ObjectStore

CODE = "code/"


def put_code(store: ObjectStore, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    store.create(f"{CODE}{name}", data)
    return name


def get_code(store: ObjectStore, name: str) -> bytes:
    data = store.get(f"{CODE}{name}")
    found = "nothing" if data is None else hashlib.sha256(data).hexdigest()
    if data is None or found != name:
        raise DamagedObject(f"{CODE}{name}", found, name)
    return bytes(data)
