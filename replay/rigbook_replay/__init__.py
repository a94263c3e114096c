"""Questions to the past: journal, time travel, proof, what-if. Filled in after the spine stands."""
