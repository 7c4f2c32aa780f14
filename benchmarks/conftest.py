"""Recipes are read by `fedstill bench`, not by pytest: five files of one name cannot all be imported."""

collect_ignore_glob = ["*/recipe.py", "*/released.py"]
