"""The ledger: the fold of the log, its store and its queries. Other services use the pure modules only."""
