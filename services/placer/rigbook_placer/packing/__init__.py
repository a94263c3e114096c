"""Policies that look at the whole mix of demands: `fgd` (ATC'23) and `rigbook`, on arrays of thousandths of cards.

`fleet`, `typical`, `fgd`, `waste` and `scores` know nothing of Rigbook's ledger: `bench/placement` runs them on the
public traces. `books` puts the ledger's cards and demands into their terms.
"""
