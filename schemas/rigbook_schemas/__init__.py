"""Words on the wire: values, events, subjects, envelopes. msgspec only, no I/O."""
