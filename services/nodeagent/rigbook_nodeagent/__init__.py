"""The node agent: cards, engines and workloads of one machine. The only author of what runs there."""
