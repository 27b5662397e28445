"""The durable side: objects, journal, segments, and what reads, merges and deletes them.

| module | does |
| --- | --- |
| `objects` | the five operations that a backend must offer, and the promises behind them |
| `names` | builds and reads every object name |
| `journal` | the one sequence of claims, plans, aborts and commits |
| `keys` | exact keys in columns: equality, hashes, grouping |
| `segments` | writes, checks and maps the immutable files of state |
| `lookup` | finds the newest value of many keys at once |
| `due` | finds the timers that are due |
| `merge` | makes one segment out of several |
| `garbage` | deletes what `protocol.retention` released |
"""
