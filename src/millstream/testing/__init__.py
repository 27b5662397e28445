"""Running a query without Spark, for tests: the same model, protocol, store and engine code, in one process.

Not simulated: Spark's scheduling, its retries and its sources; several processes; real time.
"""

from millstream.testing.faults import Crash, FaultyStore
from millstream.testing.simulated import Simulated

__all__ = ["Crash", "FaultyStore", "Simulated"]
