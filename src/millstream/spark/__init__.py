"""Epochs on Spark. The only folder that imports pyspark.

| module | does |
| --- | --- |
| `session` | a session with the settings that matter, and the checks before a start |
| `sources` | many streaming sources as one frame, with a ticker |
| `exchange` | the located columnar shuffle |
| `tasks` | what runs in Spark's Python workers |
| `executor` | runs an attempt, or a compaction, as a Spark job |
| `checkpoint` | what Spark's own checkpoint says: query id and offsets |
| `frames` | stored productions and state as DataFrames |
| `sinks` | delivers productions |
"""
