"""Methods whose generator invents the samples that nobody may send."""
