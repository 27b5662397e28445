"""What an epoch does, whoever executes it: routing, hosting, the driver's loop and the upkeep of the store.

No Spark here. `spark` executes it on a cluster, `testing` in one process; both run the same code.

| module | does |
| --- | --- |
| `spec` | what a worker must know of a query, in bytes |
| `payload` | what travels between stages, with receipts |
| `route` | splits records by slot |
| `derive` | runs stateless maps where streams are made |
| `host` | runs the steps of a level for one slot |
| `driver` | plans, judges, commits and delivers epochs |
| `upkeep` | compaction and garbage collection, beside the epochs |
| `delivery` | reads stored productions |
"""
