"""Running a query without Spark, for tests: the same model, protocol, store and engine code, in one process.

What is not simulated is listed in docs/testing.md.
"""

from millstream.testing.crashes import CRASH
from millstream.testing.faults import Crash, FaultyStore
from millstream.testing.simulated import Simulated
from millstream.testing.transcript import TranscriptMismatch, run_transcript

__all__ = ["CRASH", "Crash", "FaultyStore", "Simulated", "TranscriptMismatch", "run_transcript"]
