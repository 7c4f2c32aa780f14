"""`python -m fedstill` is the `fedstill` command."""

from fedstill.cli import main

if __name__ == "__main__":
    main()
