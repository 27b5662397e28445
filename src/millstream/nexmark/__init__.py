"""NEXMark: an auction site as a benchmark. A generator of its events, its queries, and what they must give.

>>> from millstream.nexmark import QUERIES
>>> QUERIES["q5"].title
'hot items: the auctions with the most bids in the last hour, each minute'
"""

from millstream.nexmark.catalogue import QUERIES, NexmarkQuery
from millstream.nexmark.events import epochs, generate
from millstream.nexmark.parameters import KINDS, SCHEMAS, Parameters

__all__ = ["KINDS", "QUERIES", "SCHEMAS", "NexmarkQuery", "Parameters", "epochs", "generate"]
