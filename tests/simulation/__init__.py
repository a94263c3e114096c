"""The whole system on a virtual clock, under faults drawn from a seed. `python -m tests.simulation --help`."""
