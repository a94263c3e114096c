"""Engines that run components: one protocol, two implementations."""
