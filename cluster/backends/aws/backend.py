"""Backend `aws`: EC2 instances, spot or on demand, that are terminated when the job ends."""

from cluster.backends.rented.backend import RentedBackend
from infra.aws.instances.instances import Instance

from .admin import AwsAdministration
from .instances import JobInstances
from .options import AwsOptions
from .plan import AwsPlanner


class AwsBackend(RentedBackend[Instance]):
    """Instances that are rented for one job."""

    name = "aws"
    description = "machines rented from AWS"
    options = AwsOptions
    administration = AwsAdministration
    provider_class = JobInstances
    planner_class = AwsPlanner
