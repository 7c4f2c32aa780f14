"""Files that pytest leaves alone.

`fedstill bench` reads recipes, and five files of one name cannot all be imported. Each file of peers/ needs an
environment with another library.
"""

collect_ignore_glob = ["*/recipe.py", "*/released.py", "peers/*.py"]
