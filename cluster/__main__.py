"""Runs `imgnet-cluster` as `python -m cluster`."""

from cluster.cli.app import main

if __name__ == "__main__":
    main()
