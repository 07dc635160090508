"""Backend `aws`: EC2 instances, spot or on demand, that are terminated when the job ends."""

from cluster.backends.aws.planning.plan import AwsPlanner
from cluster.backends.aws.renting.instances import JobInstances
from cluster.backends.aws.terms.options import AwsOptions
from cluster.backends.rented.backend import RentedBackend
from infra.aws.instances.instances import Instance

from .admin import AwsAdministration


class AwsBackend(RentedBackend[Instance]):
    """Instances that are rented for one job."""

    name = "aws"
    description = "machines rented from AWS"
    options = AwsOptions
    administration = AwsAdministration
    provider_class = JobInstances
    planner_class = AwsPlanner
