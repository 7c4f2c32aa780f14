"""From a file to a result."""
