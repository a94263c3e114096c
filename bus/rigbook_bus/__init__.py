"""The message bus of Rigbook. Knows no GPU and no event kind."""
