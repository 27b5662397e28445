"""A version of a query: its graph with its code, ready to be run; and who makes and tries versions.

Rules
-----
- A version is a value. A modification makes another one of it, and the old one goes on until that is committed.
- What the executor is given (`spec`) is opaque here: bytes for Spark's workers, objects in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from millstream.engine.sample import Samples
from millstream.model.change import Calls
from millstream.model.fingerprint import fingerprint
from millstream.model.graph import Graph
from millstream.model.query import Query
from millstream.model.rewrite import Rewrite
from millstream.store.forms import Forms as StateForms
from millstream.store.journal import digest_of


@dataclass(frozen=True, slots=True)
class Version:
    """A graph with its code. `code` are the fingerprints of the code of each step and map, `forms` those of the states
    whose type has changed (`store.forms`), and `bundles` the hashes of the bundles that its code is from."""

    query: Query
    graph: Graph
    code: dict[str, str]
    spec: Any
    forms: dict[tuple[str, str], bytes] = field(default_factory=dict)
    bundles: tuple[str, ...] = ()
    handed: frozenset[str] = frozenset()
    """The steps and maps whose code was handed over while the query ran: workers may have another of its name."""

    @property
    def digest(self) -> str:
        """What tells graphs apart, by all that stored state depends on."""
        return digest_of(msgspec.json.encode(self.graph.describe()))


def fingerprints(query: Query) -> dict[str, str]:
    """Those of the code of each step and map."""
    found = {name: fingerprint(node.computation) for name, node in query.steps.items()}
    return {**found, **{name: fingerprint(each.fn) for name, each in query.maps.items()}}


Forms = Mapping[tuple[str, str], bytes]
"""By step and state."""


class Workshop(Protocol):
    """Makes versions of a query where it runs: on Spark, or in a test."""

    def build(
        self,
        query: Query,
        forms: Forms = MappingProxyType({}),
        bundles: Sequence[str] = (),
        handed: frozenset[str] = frozenset(),
    ) -> Version:
        """The version of a query, checked as one that is started is. Raises `UserError`."""
        ...

    def pack_forms(self, forms: StateForms) -> bytes:
        """The forms of a state with the code that lifts its values."""
        ...

    def try_out(self, version: Version, samples: Samples | None = None) -> str:
        """Prepares workers for a version, and rehearses it if there are samples; what is wrong with it, or nothing."""
        ...

    def pack(self, rewrite: Rewrite | Calls) -> bytes:
        """A rewrite with its code, as it is stored."""
        ...

    def unpack(self, data: bytes) -> Rewrite | Calls:
        """What `pack` has packed. Raises what loading the code raises."""
        ...
