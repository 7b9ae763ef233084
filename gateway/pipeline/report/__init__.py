"""Pages for people: one HTML file with its plots inside, which needs no network and no program to look at."""
