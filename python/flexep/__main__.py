"""`python -m flexep` is `flexep`."""

from flexep.cli.main import main

if __name__ == "__main__":
    main()
