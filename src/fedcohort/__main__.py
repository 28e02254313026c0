"""``python -m fedcohort`` is the command ``fedcohort``."""

from fedcohort.cli.app import main

if __name__ == "__main__":
    main()
