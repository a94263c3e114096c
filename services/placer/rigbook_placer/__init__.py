"""The placer: decides which cards a demand gets, and appends that decision against the log."""
