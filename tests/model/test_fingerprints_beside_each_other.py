"""Fingerprints are made by several threads: modifications are prepared beside each other."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import millstream as ms
from millstream.model.fingerprint import fingerprint


class One(ms.Computation):
    def on_record(self, row: Any, at: Any) -> None:
        return None


def test_a_parser_that_another_thread_disturbs_is_asked_again_and_a_class_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Two(One):
        def on_record(self, row: Any, at: Any) -> None:
            return None

    plain, asked = inspect.getsource, []

    def disturbed(code: Any) -> str:
        asked.append(code)
        if len(asked) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=48, after=41)")
        return plain(code)

    monkeypatch.setattr(inspect, "getsource", disturbed)
    found = {fingerprint(Two()) for _ in range(3)}
    assert len(found) == 1
    assert asked[:2] == [Two, Two]
    assert asked.count(Two) == 2
