"""The rounds: draw a cohort, train it, check its uploads, let the server step."""
