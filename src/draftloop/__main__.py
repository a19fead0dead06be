"""`python -m draftloop` is `draftloop`."""

from draftloop.cli import main

if __name__ == "__main__":
    main()
