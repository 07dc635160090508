"""Fixtures of whole jobs: a user of the simulated EC2, machines with sshd, a Slurm cluster."""

from support.aws_user import renter
from support.simcloud.fixture import simcloud
from support.slurm import slurm
from support.ssh_machines import testbed

__all__ = ["renter", "simcloud", "slurm", "testbed"]
