"""What users write, as data: queries, streams, computations, declared state. No Spark, no files.

| module | holds |
| --- | --- |
| `types` | Spark's DDL types as Arrow types |
| `arrays` | strict conversion of what users give to Arrow arrays of a type |
| `state` | declared state, and how a computation reads and writes it |
| `times` | durations, and what is said of a source's event time |
| `carry` | what becomes of stored values when the type of their state changes |
| `timers` | declared timers, and the order in which they fire |
| `batch` | the records of one slot and epoch, grouped by key |
| `computation` | the base class of user code; `on_record` on top of `on_batch` |
| `sinks` | where productions go, as data |
| `query` | the graph as users build it |
| `explain` | the graph as text and as a drawing |
| `graph` | the graph, resolved and validated |
"""
