"""A word count on simulated workers with agents, for tests of replicas and handovers."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from millstream.engine.replicating import Replicator
from millstream.testing import Simulated
from millstream.testing.agents import InProcessAgents
from words import simulated

WORDS = [f"word {i}" for i in range(2000)]


class Run:
    """A word count on workers with agents, and what its totals should be."""

    def __init__(self, folder: Path, seed: int = 1, **options: Any) -> None:
        given = {"slots": 6, "workers": ("0", "1", "2"), "cache_dir": folder / "caches", "replicas": 1}
        self.sim: Simulated = simulated(**{**given, **options})
        self.rng = random.Random(seed)
        self.totals: Counter[str] = Counter()

    def feed(self, epochs: int = 1, words: int = 500) -> None:
        for _ in range(epochs):
            chosen = self.rng.choices(WORDS, k=words)
            self.totals.update(chosen)
            self.sim.feed(words=[(word,) for word in chosen])

    def check(self) -> None:
        assert dict(self.sim.state("count")) == dict(self.totals)

    @property
    def replicas(self) -> Replicator:
        assert self.sim.driver.replicator is not None
        return self.sim.driver.replicator

    @property
    def agents(self) -> InProcessAgents:
        agents = self.sim.driver.executor.agents
        assert isinstance(agents, InProcessAgents)
        return agents

    @property
    def fetched(self) -> int:
        """Bytes that the last epoch fetched from the store."""
        assert self.sim.driver.last is not None
        return self.sim.driver.last.fetched_bytes
