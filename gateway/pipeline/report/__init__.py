"""HTML pages with embedded plots, which need no network and no further program."""
