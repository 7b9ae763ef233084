"""`python -m gateway`: the command line, where the program `gateway` is not on the path."""

from gateway.cli import main

if __name__ == "__main__":
    main()
