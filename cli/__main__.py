"""`python -m hsfmt.cli`."""

from hsfmt.cli.main import main

if __name__ == "__main__":
    main(prog_name="hsfmt")
