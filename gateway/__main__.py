"""Entry point of `python -m gateway`, which is the command line.

It is for use when the program `gateway` is not on the path.
"""

from gateway.cli import main

if __name__ == "__main__":
    main()
