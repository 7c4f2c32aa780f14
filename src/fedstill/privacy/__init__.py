"""Privacy: noise on what leaves a client, what it costs together, and what may be claimed."""
