"""The tests. A package, so that they can share modules of their own by name."""
