"""Pure decisions: facts in, decision out. Standard library and NumPy only; no clock, no I/O.

| module | decides |
| --- | --- |
| `keyspace` | where in the 64-bit space a key lies, what a range and a bin are |
| `routing` | which slot owns which range |
| `manifest` | which segments make the state, and how a commit changes that |
| `compaction` | which segments of which range are worth merging next |
| `epochs` | whether an epoch is run, redelivered or refused; whether an attempt is committed or aborted |
| `time` | how watermarks follow from what was seen |
| `migration` | what a migration plan is, and what it says when printed |
| `strategies` | in which epochs the moves of a plan happen |
| `layout` | where the state of a query lies: what plans are made from |
| `planner` | which moves a rescale, a drain, a balance... takes |
| `affinity` | which slot gets which bin, so that state goes where it lies already |
| `statistics` | what each part of the key space has to do |
| `survey` | what that means for each slot and worker |
| `levelling` | which bins go where, so that no slot has too much to do |
| `adaptation` | whether to act on it: balance, isolate, scale, give a worker back |
| `placement` | which worker each slot runs on |
| `replication` | which workers hold replicas of a slot, and from whom they take them |
| `handover` | when a round of a migration may be cut over |
| `costs` | what a migration is expected to cost by each protocol |
| `steering` | what commands and migrations change at an epoch |
| `loads` | what is known of how loaded bins and workers are, and where replicas lie |
| `allocation` | on which workers the replicas of bins lie |
| `retention` | which stored objects nobody can need any more |
"""
