"""Train one good model from data that stays with many parties."""
