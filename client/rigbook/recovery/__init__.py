"""A log that was lost: what is gone, what runs, and how to go on. See docs/recovery.md."""
