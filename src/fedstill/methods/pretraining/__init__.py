"""Methods that pre-train the feature extractor on unlabeled data before round 1."""
