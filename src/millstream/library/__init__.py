"""The library of steps: what most queries are made of, on `on_batch` and declared state like any computation.

It sits on the model alone and has no access to the engine: everything here could be written by a user.
"""

from millstream.library.dedupe import dedupe
from millstream.library.filtering import filtered
from millstream.library.joins import join
from millstream.library.machines import binary, state_machine, unary
from millstream.library.ranking import top_n
from millstream.library.totals import aggregate, counted
from millstream.library.windowed import WindowedStream
from millstream.library.windows import check_window
from millstream.model.entries import entry

entry("aggregate")(aggregate)
entry("count")(lambda keyed, name: aggregate(keyed, name, counted()))
entry("window")(lambda keyed, window: WindowedStream(keyed, check_window(window)))
entry("dedupe")(dedupe)
entry("filter")(filtered)
entry("join")(join)
entry("top_n")(top_n)
entry("state_machine")(state_machine)
entry("unary")(unary)
entry("binary")(binary)
