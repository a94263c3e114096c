"""The whole system on a virtual clock, under faults drawn from a seed. `python -m tests.simulation --help`."""

import os

if os.environ.get("RIGBOOK_MUTANT"):
    # Before anything of ours is imported: a mistake is planted into the code under test (see `mutants`).
    from tests.simulation.planting import plant

    plant(os.environ["RIGBOOK_MUTANT"])
