"""The durable side: objects, journal, segments, and what reads, merges and deletes them.

| module | does |
| --- | --- |
| `objects` | the six operations that a backend must offer, and the promises behind them |
| `names` | builds and reads every object name |
| `journal` | the one sequence of claims, plans, aborts and commits |
| `keys` | exact keys in columns: equality, hashes, grouping |
| `chunks` | cuts a segment up, so that any range of it can be read without the rest |
| `held` | an object as far as it is here, checked chunk by chunk |
| `cache` | the directory in which a worker keeps what it reads and writes |
| `segments` | writes, checks and maps the immutable files of state |
| `forms` | values that were stored before the type of their state changed |
| `lookup` | finds the newest value of many keys at once |
| `due` | finds the timers that are due |
| `merge` | makes one segment out of several |
| `garbage` | deletes what `protocol.retention` released |
"""
