"""Starting queries and controlling running ones, from Python and from the command line."""
