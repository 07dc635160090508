"""`python -m cluster` is `imgnet-cluster`."""

from cluster.cli.app import main

if __name__ == "__main__":
    main()
