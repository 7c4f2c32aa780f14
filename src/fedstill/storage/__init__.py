"""Files that must never be half written: atomic writes, locks, caches, TOML."""
