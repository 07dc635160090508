"""`python -m cluster` is `imgnet-cluster`."""

from .cli import main

if __name__ == "__main__":
    main()
